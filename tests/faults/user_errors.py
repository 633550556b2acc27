"""Exceptions of the user's code, where torch calls it: afterwards everything is as on the CPU."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import lazytpu
from tests.faults.children import in_child, say
from tests.faults.results import Result, timed


class TheUsersError(Exception):
    """What the user's code raises."""


class Raises:
    """Raises at its n-th call."""

    def __init__(self, n: int) -> None:
        self.left = n

    def __call__(self, *_: Any, **__: Any) -> None:
        self.left -= 1
        if self.left == 0:
            raise TheUsersError


class _Backward(torch.autograd.Function):
    at: Raises

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        _Backward.at()
        return grad * 2


class _Data(IterableDataset[torch.Tensor]):
    def __init__(self, at: Raises) -> None:
        self.at = at

    def __iter__(self) -> Iterator[torch.Tensor]:
        for i in range(4):
            self.at()
            yield torch.arange(12.0).view(3, 4).add(i).sin()


class _Mode(torch.overrides.TorchFunctionMode):
    def __init__(self, at: Raises) -> None:
        self.at = at

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.at()
        return func(*args, **(kwargs or {}))


def _hook(register: str) -> Callable[[nn.Module, torch.optim.Optimizer, Raises], object]:
    return lambda net, optimizer, at: getattr(net[1], register)(lambda *_: at())


PLACES: dict[str, Callable[[Any, Any, Raises], object]] = {
    "forward hook": _hook("register_forward_hook"),
    "forward pre-hook": _hook("register_forward_pre_hook"),
    "backward hook": _hook("register_full_backward_hook"),
    "backward pre-hook": _hook("register_full_backward_pre_hook"),
    "hook of a parameter": lambda net, optimizer, at: net[0].weight.register_hook(lambda g: at()),
    "hook after accumulation": lambda net, optimizer, at: net[0].weight.register_post_accumulate_grad_hook(
        lambda p: at()
    ),
    "optimizer pre-hook": lambda net, optimizer, at: optimizer.register_step_pre_hook(lambda *_: at()),
    "optimizer post-hook": lambda net, optimizer, at: optimizer.register_step_post_hook(lambda *_: at()),
    "backward of a function": lambda net, optimizer, at: setattr(_Backward, "at", at),
    "data": lambda net, optimizer, at: None,
    "data of a worker": lambda net, optimizer, at: None,
    "data of DeviceLoader": lambda net, optimizer, at: None,
    "torch function mode": lambda net, optimizer, at: None,
}


def _train(device: Any, place: str, n: int, how: str) -> list[Any]:
    """Two epochs of a small training in which something raises once; all that can be seen afterwards."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    at, never = Raises(n), Raises(0)
    _Backward.at = never
    PLACES[place](net, optimizer, at)
    mode = _Mode(at if place == "torch function mode" else never)
    seen: list[Any] = []

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = _Backward.apply(net(x)).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = lazytpu.compile(step) if how == "compile" and device != "cpu" else step
    for epoch in range(2):
        try:
            data = _Data(at if place.startswith("data") else never)
            loader: Any = DataLoader(data, batch_size=None, num_workers=int(place == "data of a worker"))
            if place == "data of DeviceLoader" and device != "cpu":
                loader = lazytpu.DeviceLoader(loader)
            for x in loader:
                with mode:
                    loss = run(x.to(device))
                if how == "read":
                    seen.append(loss.item())
                elif device != "cpu":
                    lazytpu.mark_step()
        except TheUsersError:
            seen.append(f"raised in epoch {epoch}")
            gc.collect()
    state = [*net.state_dict().values(), *(p.grad for p in net.parameters())]
    state += [v for s in optimizer.state.values() for v in s.values()]
    return [*seen, *(None if t is None else t.cpu() for t in state)]


def _try(place: str, n: int, how: str) -> None:
    want, got = (_train(device, place, n, how) for device in ("cpu", lazytpu.device()))
    assert any(isinstance(s, str) for s in got), "nothing raised"
    assert len(want) == len(got) and [s for s in want if isinstance(s, str)] == [s for s in got if isinstance(s, str)]
    for a, b in zip(want, got, strict=True):
        if not isinstance(a, str):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def _try_all(seeds: list[int]) -> None:
    for seed in seeds:
        place = [*PLACES][seed % len(PLACES)]
        how = ("read", "mark_step", "compile")[seed // len(PLACES) % 3]
        n = seed // len(PLACES) // 3 % (3 if how == "compile" else 4) + 1  # the fourth call is a replay
        say(f"{place}, call {n}, {how}")
        try:
            _try(place, n, how)
        except Exception:
            traceback.print_exc()
            return
    say("")


@timed
def user_errors(count: int, seed: int) -> Result:
    """Exceptions in hooks, backward passes, modes, data sets and loaders"""
    found = []
    per_child = 13
    for first in range(seed, seed + count, per_child):
        ended = in_child(_try_all, [*range(first, min(first + per_child, seed + count))], timeout_s=240)
        if ended.problem or ended.said[-1]:
            found.append(f"{ended.said[-1]}: {ended.problem or ended.printed[-1500:]}")
    return Result(count, f"exceptions in {', '.join(PLACES)}", found)
