"""Hold Ctrl-C back where an interrupt would leave something half done.

Between the start of an executable and the storing of its results it would lose the buffers that were donated;
inside jax's own context managers it would leave the user's configuration changed.
"""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import Any

# The functions in C below the signal module's own, which turn numbers into enums: this is done at every cut.
_get: Any = getattr(signal.getsignal, "__wrapped__", signal.getsignal)
_set: Any = getattr(signal.signal, "__wrapped__", signal.signal)
_SIGINT = int(signal.SIGINT)


class uninterrupted:
    """Holds Ctrl-C back to the end of the block.

    The handler of another signal may raise where nothing can be cleaned up any more.  So the one installed here knows
    the frame it works for, and gives its place back when that is over.
    """

    __slots__ = ("owner", "previous", "received")

    def __enter__(self) -> None:
        self.previous: Any = None
        self.received: tuple[Any, ...] | None = None
        self.owner: FrameType | None = None
        if threading.get_ident() == threading.main_thread().ident:
            handler = _get(_SIGINT)
            if callable(handler):
                self.previous, self.owner = handler, sys._getframe(1)
                _set(_SIGINT, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        running = frame
        while running is not None and running is not self.owner:
            running = running.f_back
        if running is not None:
            self.received = number, frame
        else:
            _set(_SIGINT, self.previous)
            self.previous(number, frame)

    def __exit__(self, *_: object) -> None:
        self.owner = None
        if self.previous is not None:
            _set(_SIGINT, self.previous)
            if self.received is not None:
                self.previous(*self.received)
