"""Keep Python's garbage collector from taking the tensors of a step for objects that will stay.

What a collection of generation 1 finds alive counts as old, and once a quarter as many objects have become old as
there are, Python goes through all of them: 0.2 s with torch and jax loaded.  In a step of thousands of small objects
such collections come in the middle, when all of them are alive though none will stay.  So where one is due in a step,
it is run at the step's first op instead, when what the last step left behind is gone.

Beside it, jax's own callback of the collector loses no signal any more.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from gc import callbacks, collect, disable, enable, get_count, get_threshold, isenabled

_IN_PARTS = sys.version_info >= (3, 14)  # there the collector goes through a small part of all objects at a time
_before = _a_step = 0  # collections of generation 0 since the last one of generation 1: at the last call, and by a step


def collect_before_step() -> None:
    """Run a collection of generations 0 and 1 that would otherwise come in the middle of a step like the last one."""
    global _before, _a_step
    count = get_count()[1]
    if count >= _before:
        _a_step = count - _before
    if count + _a_step > get_threshold()[1] and isenabled() and not _IN_PARTS:
        collect(1)
        count = 0
    _before = count


@contextmanager
def paused() -> Iterator[None]:
    """Keep the collector from running inside, where much is made that stays."""
    was_enabled = isenabled()
    disable()
    try:
        yield
    finally:
        if was_enabled:
            enable()


def register() -> None:
    """Let no exception be lost in jax's callback of the collector: of Ctrl-C, or of a handler that a program installed.

    Handlers of signals run where Python's bytecode goes on, and what they raise within a callback is printed and gone.
    So it is called from C: what came meanwhile is raised in the user's program.
    """
    for i, callback in enumerate(callbacks):
        collect_garbage = getattr(getattr(callback, "__globals__", {}).get("_jax"), "collect_garbage", None)
        if getattr(callback, "__name__", "") == "_xla_gc_callback" and collect_garbage is not None:
            given = [ctypes.py_object] * 3  # the function reads the first; the collector passes two more
            call = ctypes.PYFUNCTYPE(ctypes.py_object, *given)(("PyObject_CallNoArgs", ctypes.pythonapi))
            callbacks[i] = partial(call, collect_garbage)
