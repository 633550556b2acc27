"""Exceptions of backward hooks, which run on a thread of torch, come out of the backward pass and end no process."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

from lazytpu.torch_backend import hook_errors


class MyError(Exception):
    pass


def fail(*_: Any) -> None:
    raise MyError("mine")


PLACES: dict[str, Callable[[nn.Sequential, torch.Tensor], object]] = {
    "module": lambda net, y: net[1].register_full_backward_hook(fail),
    "before module": lambda net, y: net[1].register_full_backward_pre_hook(fail),
    "parameter": lambda net, y: net[0].weight.register_hook(fail),
    "accumulated": lambda net, y: net[0].weight.register_post_accumulate_grad_hook(fail),
    "tensor": lambda net, y: y.register_hook(fail),
    "node": lambda net, y: y.grad_fn.register_hook(fail),  # type: ignore[union-attr]
    "before node": lambda net, y: y.grad_fn.register_prehook(fail),  # type: ignore[union-attr]
}


@pytest.mark.parametrize("place", PLACES)
def test_an_exception_of_a_hook_is_raised(place: str, device: torch.device) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)).to(device)
    y = net(torch.ones(2, 3).to(device))
    PLACES[place](net, y)
    if "module" in place:  # which is hooked from its next call on
        y = net(torch.ones(2, 3).to(device))
    with pytest.raises(MyError, match="mine") as caught:
        y.sum().backward()
    assert any(entry.name == "fail" for entry in caught.traceback)
    assert not hook_errors._kept
    net.zero_grad()
    (net[2].weight.sum() * 2).backward()  # the engine goes on
    assert net[2].weight.grad.tolist() == [[2.0] * 3]  # type: ignore[union-attr]


def test_hooks_that_raise_in_two_threads_and_in_a_backward_pass_within_another(device: torch.device) -> None:
    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                w = torch.ones(2, device=device, requires_grad=True) * 1
                w.register_hook(fail)
                w.sum().backward()
            return grad

    seen = []

    def work() -> None:
        x = torch.ones(2, device=device, requires_grad=True)
        try:
            Inner.apply(x).sum().backward()
        except Exception as error:
            seen.append(repr(error))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == ["MyError('mine')"] * 2


def test_what_the_hook_held_is_freed_with_its_exception(device: torch.device) -> None:
    def held() -> weakref.ref[torch.Tensor]:
        x = torch.ones(3, device=device, requires_grad=True) * 2
        large = torch.ones(3)

        def hook(grad: torch.Tensor) -> None:
            kept = large  # noqa: F841  a variable of a frame of the traceback
            raise MyError("mine")

        x.register_hook(hook)
        with suppress(MyError):
            x.sum().backward()
        return weakref.ref(large)

    gc.collect()
    gc.disable()
    try:
        assert held()() is None
    finally:
        gc.enable()
