"""Name what lazytpu does, for profilers: cutting, lowering, compiling, starting, waiting.

Torch's profiler, where it runs, and the observers (`lazytpu.profiler`) show a region.  Without them a region costs one
call, once or a few times in a step and never in an op.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import ParamSpec, TypeVar

import torch

from lazytpu.observers import calls_of

_P = ParamSpec("_P")
_T = TypeVar("_T")

_observers = calls_of("region")
_torch_is_profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled


def region(name: str, detail: str = "") -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Make the calls of a function a region, as a decorator.

    Args:
        name: of the region, shown as ``lazytpu.<name>``.
        detail: name of the argument that is shown behind it, which has to be the first.
    """
    full = f"lazytpu.{name}"

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        @functools.wraps(function)
        def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            if not _observers and not _torch_is_profiling():
                return function(*args, **kwargs)
            with entered(f"{full}: {args[0] if args else kwargs[detail]}" if detail else full):
                return function(*args, **kwargs)

        return call

    return decorate


def entered(name: str) -> ExitStack:
    """Return a region that is begun, for those who listen now."""
    with ExitStack() as stack:
        for call in list(_observers):
            stack.enter_context(call(name))
        stack.enter_context(for_torch(name))
        return stack.pop_all()


def for_torch(name: str) -> AbstractContextManager[object]:
    """Return a region in torch's profiler, if it runs."""
    return torch.profiler.record_function(name) if _torch_is_profiling() else nullcontext()
