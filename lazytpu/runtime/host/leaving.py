"""End daemon threads that work with tensors before the interpreter does.

Python before 3.14 ends a daemon thread where it next asks for the interpreter's lock.  Inside C++ of torch or XLA that
is an abort of the process, whatever its exit status would have been; in the middle of an import it is a traceback.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TypeVar

import jax

_AT_MOST_S, _COMPILING_AT_MOST_S, _BETWEEN_S = 5.0, 10.0, 0.05
_IDLE_LOOKS = 6  # after which a thread that used no processor time is left alone, if it is not in XLA
_WITH_XLA = (str(Path(jax.__file__).parent), str(Path(__file__).parents[2]))
_WAITS = {threading.__file__, *(getattr(sys.modules.get(name), "__file__", None) for name in ("queue", "selectors"))}
_Told = TypeVar("_Told", threading.ExceptHookArgs, "sys.UnraisableHookArgs")
_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc


def register() -> None:
    """Do so at the end of this process, before what was imported earlier, such as jax, ends itself."""
    if sys.version_info < (3, 14):
        atexit.register(_end_threads)


def _end_threads() -> None:
    """Raise SystemExit, which ends a thread silently, in those that work, and wait while they go on working."""
    frames = sys._current_frames()
    working = [t for t in threading.enumerate() if t.daemon and _works(t, frames.get(t.ident or 0))]
    used, idle = dict.fromkeys(working, -1.0), dict.fromkeys(working, 0)
    waited_s = 0.0  # by looks, not by the clock: a process that is stopped meanwhile loses none of it
    if working:
        sys.unraisablehook = _but_for_exits(sys.unraisablehook)
        threading.excepthook = _but_for_exits(threading.excepthook)
    while working:  # more than once: a bare `except` or a callback may swallow it
        for thread in working:
            _raise_in(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit))
        working[0].join(_BETWEEN_S)
        working, frames = [thread for thread in working if thread.is_alive()], sys._current_frames()
        waited_s += _BETWEEN_S
        for thread in working:
            before, used[thread] = used[thread], _processor_time(thread)
            in_xla = _is_in_xla(frames.get(thread.ident or 0))
            idle[thread] = 0 if used[thread] > before or in_xla else idle[thread] + 1
            if waited_s > (_COMPILING_AT_MOST_S if in_xla else _AT_MOST_S):
                idle[thread] = _IDLE_LOOKS
        working = [thread for thread in working if idle[thread] < _IDLE_LOOKS]


def _but_for_exits(hook: Callable[[_Told], object]) -> Callable[[_Told], None]:
    """Return a hook that says nothing of a SystemExit, or of what Python made of one, as where it defines a class."""

    def quiet(given: _Told) -> None:
        error = given.exc_value
        while error is not None and not isinstance(error, SystemExit):
            error = error.__cause__ or error.__context__
        if error is None and not issubclass(given.exc_type, SystemExit):
            hook(given)

    return quiet


def _is_in_xla(frame: FrameType | None) -> bool:
    """Return whether a thread may be in C++ of XLA, where it may wait for other threads: as in a compile."""
    return frame is not None and frame.f_code.co_filename.startswith(_WITH_XLA)


def _processor_time(thread: threading.Thread) -> float:
    """Return what a living thread has used: one that sleeps, or waits for a connection, uses none."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.monotonic()
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0))


def _works(thread: threading.Thread, frame: FrameType | None) -> bool:
    """Return whether a thread of the user's runs code that has torch, and does not just wait for another one."""
    ours = thread is threading.current_thread() or thread.name.startswith("lazytpu-")
    if ours or isinstance(thread, threading._DummyThread) or frame is None or frame.f_code.co_filename in _WAITS:
        return False
    while frame is not None and "torch" not in frame.f_globals:
        frame = frame.f_back
    return frame is not None
