"""The same training on the CPU and, compiled with `lazytpu.compile`, on the device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import lazytpu

STEPS = 8


def replays() -> int:
    return lazytpu.metrics.counter("replay")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12, bias=False), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 4))


def batches(n: int = STEPS, size: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(size, 6), torch.randint(0, 4, (size,))) for _ in range(n)]


def same(got: Any, want: Any) -> None:
    """Whether two nests hold the same, wherever their tensors are."""
    if isinstance(want, dict):
        assert list(got) == list(want)
        for key in want:
            same(got[key], want[key])
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want)
        for g, w in zip(got, want, strict=True):
            same(g, w)
    elif isinstance(want, torch.Tensor):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got.detach().cpu(), want.detach(), rtol=1e-4, atol=1e-5)
    else:
        assert got == want


def state_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    grads = [p.grad for p in net.parameters()]
    state = copy.deepcopy(optimizer.state_dict())
    for group in state["param_groups"]:  # `compile` switches these
        for name in ("capturable", "fused", "foreach"):
            group.pop(name, None)
        group["lr"] = float(group["lr"])
    return [dict(net.state_dict()), grads, state]


class Twins:
    """The same training on the CPU and, compiled, on the device."""

    def __init__(
        self, optimizer: Callable[[Any], torch.optim.Optimizer], make: Callable[[], nn.Module] = network
    ) -> None:
        self.nets = make(), make().to(lazytpu.device())
        self.optimizers = [optimizer(net.parameters()) for net in self.nets]
        self.steps: list[Any] = []
        for net, opt in zip(self.nets, self.optimizers, strict=True):
            self.steps.append(self.step(net, opt))
        self.steps[1] = lazytpu.compile(self.steps[1])

    def step(self, net: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., torch.Tensor]:
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    def run(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """One step on both sides; the losses are the same."""
        device = lazytpu.device()
        same(self.steps[1](x.to(device), y.to(device)), self.steps[0](x, y))

    def check(self) -> None:
        """Everything both sides hold is the same."""
        same(state_of(self.nets[1], self.optimizers[1]), state_of(self.nets[0], self.optimizers[0]))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05),
    "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01),
    "one by one": lambda p: torch.optim.AdamW(p, 0.01, foreach=False),
    "fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5),
    "radam": lambda p: torch.optim.RAdam(p, 0.01),
}
