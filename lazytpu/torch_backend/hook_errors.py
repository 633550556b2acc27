"""Exceptions of the user's hooks on their way out of torch's autograd.

The engine leaves a hook's exception set in the thread while its C++ unwinds, and on this way it asks the device guard,
which is Python: the call would fail because of that exception, and end the process.  So the guard takes the exception
out of the thread and keeps it, and the engine, which finds none any more, raises the one that was kept.
"""

from __future__ import annotations

from functools import partial
from threading import get_ident

import torch

# A call of it fails where an exception is set, with it as the cause: `partial` looks after the function that it calls,
# and Python's own shortcuts for calls do not.
_checked_call = partial(get_ident)
_kept: list[BaseException] = []


def take_pending() -> None:
    """Keep an exception that is set in this thread though nothing has raised it, for `_Engine` to raise."""
    try:
        _checked_call()
    except SystemError as error:
        if error.__cause__ is None:
            raise
        _kept.append(error.__cause__)


class _Engine(torch._C._ImperativeEngine):
    """Torch's engine, which raises what `take_pending` has kept."""

    def run_backward(self, *args: object, **kwargs: object) -> tuple[torch.Tensor, ...]:
        try:
            return super().run_backward(*args, **kwargs)
        except SystemError:
            if not _kept:
                raise
            error = _kept.pop()
        try:
            raise error
        finally:
            del error  # a cycle of it and this frame would hold the frames that called, and the tensors in them


def register() -> None:
    """Give autograd the engine."""
    setattr(torch.autograd.Variable, "_execution_engine", _Engine())  # noqa: B010  not among its declared attributes
