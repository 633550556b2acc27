"""Note that the process is asked to end (SIGTERM), which then does not end it, until a script asks."""

from __future__ import annotations

import signal
import threading
import warnings
from types import FrameType

from lazytpu.runtime import world

_asked: list[int] = []
"""Not empty once the signal has come."""

_before: list[signal._HANDLER] = []
"""The handler that `watch` has replaced."""


def watch() -> None:
    """Note the signal from now on; only the main thread of a single process can."""
    if _before:
        return
    if world.size() > 1 or threading.current_thread() is not threading.main_thread():
        warnings.warn("SIGTERM is watched in the main thread of a single process", stacklevel=3)
        return

    def note(number: int, frame: FrameType | None) -> None:
        _asked.append(number)

    _before.append(signal.signal(signal.SIGTERM, note))


def asked(step: int = 0) -> bool:
    """Return whether the process was asked to end."""
    return bool(_asked)


def stop() -> None:
    """Give the signal back to who had it before."""
    _asked.clear()
    if _before:
        signal.signal(signal.SIGTERM, _before.pop())
