"""Weights are updated where they lie: the optimized HLO copies none, and the values stay what torch computes."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lazytpu
from lazytpu.diagnosis import events
from lazytpu.lowering import lower

device = lazytpu.device()
pytestmark = pytest.mark.skipif(lazytpu.platform() != "cpu", reason="elsewhere XLA's own order is left alone")
LARGE = 4096


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 40))


def tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 40))
    net[4].weight = net[0].weight
    return net


def convolutional() -> nn.Module:
    layers = [
        nn.Conv2d(3, 24, 3),
        nn.ReLU(),
        nn.Conv2d(24, 24, 3, bias=False),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.Flatten(),
    ]
    return nn.Sequential(*layers, nn.Linear(24 * 16, 40))


MODELS = {
    "mlp": (mlp, (8, 24)),
    "tied": (tied, (8, 40)),
    "convolutional": (convolutional, (4, 3, 8, 8)),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, 1e-3, foreach=True),
    "fused": lambda p: torch.optim.Adam(p, 1e-3, fused=True),
    "single": lambda p: torch.optim.SGD(p, 0.1, foreach=False),
}


def train(net: nn.Module, x: torch.Tensor, make: Any, end: Callable[[], None], steps: int = 3) -> list[torch.Tensor]:
    optimizer = make(net.parameters())
    y = torch.arange(len(x), device=x.device)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
        end()
    return [p.detach().cpu() for p in net.parameters()]


def large_copies() -> list[str]:
    """The copies of 4 KB and more in what was compiled last."""
    executable = events.compilations[-1].reference()
    entry = executable.compiled.as_text().partition("\nENTRY ")[2]
    shapes = re.findall(r" = (f32\[[\d,]+\])\S* copy\(", entry)
    return [s for s in shapes if 4 * math.prod(map(int, s[4:-1].split(","))) >= LARGE]


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [*[("mlp", optimizer) for optimizer in OPTIMIZERS], ("tied", "sgd"), ("convolutional", "sgd")],
)
def test_no_weight_is_copied(model: str, optimizer: str) -> None:
    make, size = MODELS[model]
    net, x = make(), torch.randn(size)
    twin = copy.deepcopy(net).to(device)
    wanted = train(net, x, OPTIMIZERS[optimizer], lambda: None)
    got = train(twin, x.to(device), OPTIMIZERS[optimizer], lazytpu.mark_step)
    for a, b in zip(wanted, got, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)
    if model != "convolutional":  # its weights are copied into another order besides
        assert large_copies() == []


def test_without_the_dependencies_there_are_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lower, "reads_before", lambda graph: {})
    net = nn.Sequential(nn.Linear(24, 44), nn.ReLU(), nn.Linear(44, 44), nn.ReLU(), nn.Linear(44, 40)).to(device)
    train(net, torch.randn(8, 24, device=device), OPTIMIZERS["sgd"], lazytpu.mark_step)
    assert "f32[44,44]" in large_copies()


def test_updates_are_lowered_in_the_order_of_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the program would be another one in each process."""
    sizes = range(40, 56)
    net = nn.Sequential(*[nn.Linear(n, n + 1) for n in sizes]).to(device)
    shapes = []

    def noted(values: Any, new: Any) -> Any:
        shapes.append(new.shape)
        return new

    monkeypatch.setattr(lower, "after", noted)
    train(net, torch.randn(8, 40, device=device), OPTIMIZERS["fused"], lazytpu.mark_step, steps=1)
    assert shapes == [(n + 1, n) for n in sizes][1:]


def test_gradients_that_are_gone_before_the_cut() -> None:
    """Then no gradient lies in memory, and the results of the matrix products are waited for."""
    net = nn.Sequential(nn.Linear(24, 52), nn.ReLU(), nn.Linear(52, 52), nn.ReLU(), nn.Linear(52, 40))
    x, y = torch.randn(8, 24), torch.arange(8)
    twin = copy.deepcopy(net).to(device)

    def run(net: nn.Module, x: torch.Tensor, y: torch.Tensor, end: Callable[[], None]) -> list[torch.Tensor]:
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(3):
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            end()
        return [p.detach().cpu() for p in net.parameters()]

    wanted, got = run(net, x, y, lambda: None), run(twin, x.to(device), y.to(device), lazytpu.mark_step)
    assert large_copies() == []
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int32])
def test_what_is_waited_for_never_shows(dtype: torch.dtype) -> None:
    """Whatever the bits are: NaN, infinities, zeros of both signs and all ones are left out of the result."""
    values = [float("nan"), float("inf"), -0.0, 0.0, 1.0] if dtype.is_floating_point else [-1, 0, 1, 2**31 - 1]
    for value in values:
        w = torch.ones(64, 64, dtype=dtype)
        x = torch.full((64, 64), value).to(dtype)
        results = []
        for place in ("cpu", device):
            a, b = w.to(place, copy=True), x.to(place)
            lazytpu.mark_step()
            read = a * b
            a.copy_(torch.where(b == b, a + 1, a + 2))
            lazytpu.mark_step()
            results.append((read.cpu(), a.cpu()))
        torch.testing.assert_close(results[1], results[0], equal_nan=True, rtol=0, atol=0)


def test_a_read_of_old_and_new_makes_no_circle() -> None:
    w = torch.randn(64, 64)
    on_device = w.to(device)
    lazytpu.mark_step()
    old = on_device.clone()
    on_device.mul_(2)
    change = on_device - old
    lazytpu.mark_step()
    torch.testing.assert_close(change.cpu(), w)
    torch.testing.assert_close(on_device.cpu(), w * 2)
