"""Hold signals back whose handlers may raise where an exception would leave something half done.

Between the start of an executable and the storing of its results it would lose the buffers that were donated;
inside jax's own context managers it would leave the user's configuration changed.  Ctrl-C raises, and so do the
handlers that programs install: of SIGTERM, to save a checkpoint before they end, or of SIGALRM, for a time limit.
"""

from __future__ import annotations

import importlib
import signal
import sys
import threading
from types import FrameType
from typing import Any

# The module in C below `signal`, which turns numbers into enums and back for ten times the cost: done at every cut.
_below = importlib.import_module("_signal")
_get, _set = _below.getsignal, _below.signal
_NAMES = ("SIGINT", "SIGTERM", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGHUP")  # those that a system has
_SIGNALS = tuple(int(getattr(signal, name)) for name in _NAMES if hasattr(signal, name))


deferred: list[int] = []
"""Signals that are held back, for what waits meanwhile: it raises, and so lets them through."""


class uninterrupted:
    """Holds signals with a handler in Python back to the end of the block.

    The handler of another signal may raise where nothing can be cleaned up any more.  So the one installed here knows
    the frame it works for, and gives its place back when that is over.
    """

    __slots__ = ("owner", "previous", "received")

    def __enter__(self) -> None:
        self.previous: dict[int, Any] = {}
        self.received: list[int] = []
        self.owner: FrameType | None = None
        if threading.get_ident() == threading.main_thread().ident:
            for number in _SIGNALS:
                if callable(handler := _get(number)):
                    self.previous[number] = handler
                    _set(number, self._receive)
            self.owner = sys._getframe(1)  # last: if one of them raises before, the others give their places back

    def _receive(self, number: int, frame: FrameType | None) -> None:
        running = frame
        while running is not None and running is not self.owner:
            running = running.f_back
        if running is not None:
            self.received.append(number)
            deferred.append(number)
        else:
            _set(number, self.previous[number])
            self.previous[number](number, frame)

    def __exit__(self, *_: object) -> None:
        self.owner = None
        for number, handler in self.previous.items():
            _set(number, handler)
        if self.received:
            deferred.clear()
            _raise_all(self.received)


def _raise_all(numbers: list[int]) -> None:
    """Raise signals one after the other; the handlers of the later ones run even if that of one before raises."""
    try:
        signal.raise_signal(numbers[0])
    finally:
        if numbers[1:]:
            _raise_all(numbers[1:])
