"""`lazytpu.compile` on a mesh: replays, with the numbers of one device, and everything lies as it did."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lazytpu
from lazytpu import spmd
from tests.support.eight_devices import eight_devices

WHOLE = torch.arange(32.0).reshape(8, 4)
Split = Callable[[nn.Module, spmd.Mesh], tuple[object, ...]]


def mesh() -> spmd.Mesh:
    return spmd.Mesh((2, 4), ("data", "model"))


def replays() -> int:
    return int(lazytpu.metrics.counter("replay"))


def fully(model: nn.Module, mesh: spmd.Mesh) -> tuple[object, ...]:
    for p in model.parameters():
        spmd.mark_sharding(p, mesh, (("data", "model"),))  # 10 outputs over 8 devices among them
    return (("data", "model"),)


def by_data(model: nn.Module, mesh: spmd.Mesh) -> tuple[object, ...]:
    return ("data",)


def train(split: Split | None, steps: int = 9) -> tuple[list[float], list[torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Dropout(0.2), nn.Linear(32, 10)).to(lazytpu.device())
    spec = split(model, mesh()) if split else ()
    updater = torch.optim.AdamW(model.parameters(), lr=0.01)

    @lazytpu.compile
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(x), y)
        updater.zero_grad()
        loss.backward()
        updater.step()
        return loss.detach()

    losses = []
    for n in range(steps):
        x, y = torch.randn(16, 16).to(lazytpu.device()), torch.randint(10, (16,)).to(lazytpu.device())
        if split:
            spmd.mark_sharding(x, mesh(), spec)
            spmd.mark_sharding(y, mesh(), spec)
        losses.append(step(x, y).item())
        if n == 6:
            updater.param_groups[0]["lr"] = 0.005
    for p in model.parameters():
        states = [s for s in updater.state[p].values() if s.dim()]
        like = (
            [*states, p.grad] if p.dim() > 1 else states
        )  # the gradient of a bias is a view of one with two dimensions
        assert {spmd.sharding_of(s) for s in like} == {spmd.sharding_of(p)}
    return losses, [p.detach().cpu() for p in model.parameters()]


@eight_devices
def test_training_replays_on_a_mesh() -> None:
    want, alone = train(None)
    for split in (fully, by_data):
        lazytpu.metrics.reset()
        got, parameters = train(split)
        assert replays() >= 4, lazytpu.explain()
        assert got == pytest.approx(want, rel=1e-5)
        torch.testing.assert_close(parameters, alone)


@eight_devices
def test_results_of_a_replay_lie_as_those_of_a_recorded_call() -> None:
    @lazytpu.compile
    def step(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        whole = spmd.replicate(x + 1, mesh())
        return x * 2, spmd.mark_sharding(x.T + 1, mesh(), ("model", "data")), whole, whole.T, x.sum()

    before, x = replays(), spmd.mark_sharding(WHOLE.to(lazytpu.device()), mesh(), ("data",))
    lies = []
    for _ in range(5):
        results = step(x)
        lies.append([spmd.sharding_of(r) for r in results])
        torch.testing.assert_close(
            [r.cpu() for r in results], [WHOLE * 2, WHOLE.T + 1, WHOLE + 1, WHOLE.T + 1, WHOLE.sum()]
        )
    assert replays() - before == 3, lazytpu.explain()
    assert all(each == lies[0] for each in lies) and lies[0][1].spec == ("model", "data")


@eight_devices
def test_what_is_marked_between_calls_is_recorded_again() -> None:
    w = WHOLE.to(lazytpu.device())

    @lazytpu.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        w.mul_(2)
        return x + w

    before, times = replays(), 0
    for spec in (None, ("data",), (None, "model"), None):
        if spec is None:
            spmd.clear_sharding(w)
        else:
            spmd.mark_sharding(w, mesh(), spec)
        for _ in range(4):
            times += 1
            torch.testing.assert_close(step(WHOLE.to(lazytpu.device())).cpu(), WHOLE + WHOLE * 2**times)
    assert replays() - before >= 7, lazytpu.explain()


@eight_devices
def test_programs_of_one_device_replay_beside_a_mesh() -> None:
    x, w = WHOLE.to(lazytpu.device()), torch.ones(8, 4).to(lazytpu.device())

    @lazytpu.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        w.add_(1)
        return x * w

    before = replays()
    for n in range(6):
        torch.testing.assert_close(step(x).cpu(), WHOLE * (n + 2))
        y = spmd.mark_sharding(WHOLE.to(lazytpu.device()), mesh(), ("data",)) + x + w  # both are given to all devices
        torch.testing.assert_close(y.cpu(), 2 * WHOLE + n + 2)
    assert replays() - before == 4, lazytpu.explain()


@eight_devices
def test_a_function_that_marks_its_argument_is_recorded_in_each_call() -> None:
    step = lazytpu.compile(lambda x: spmd.mark_sharding(x, mesh(), ("data",)) * 2)
    before = replays()
    for _ in range(6):
        x = WHOLE.to(lazytpu.device())
        torch.testing.assert_close(step(x).cpu(), WHOLE * 2)
        assert spmd.sharding_of(x).spec == ("data", None)
    assert replays() == before
    assert "changes the shape, strides or sharding of an argument" in lazytpu.explain()
