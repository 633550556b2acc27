"""Storages whose contents wait on the host, so that they need not lie on one device before they lie on many."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from lazytpu.ir.op_schema import Arg
from lazytpu.ir.sharding import Sharding
from lazytpu.runtime import transfers
from lazytpu.runtime.client import Buffer
from lazytpu.tensors.layout import Layout
from lazytpu.tensors.storage import Storage

choices: list[Callable[[Layout], Sharding | None]] = []
"""Not empty where tensors wait on the host: how one that nobody has marked is to lie when it is used, None for one
device."""

_sending = threading.RLock()


class Unsent(Storage):
    """A storage whose contents are on the host until someone asks for ``buffer``; it is a `Storage` then.

    Attributes:
        contents: the memory is its own.
    """

    contents: NDArray[np.generic]

    @property
    def buffer(self) -> Arg:
        with _sending:
            if type(self) is Unsent:
                self.send(choices[0](self.layout) if choices else None)
        return self.buffer

    @buffer.setter
    def buffer(self, buffer: Buffer | None) -> None:
        setattr(self, "__class__", Storage)  # noqa: B010
        del self.contents
        self.buffer = buffer

    def send(self, sharding: Sharding | None) -> None:
        """Take the contents to one device, or to the mesh of a sharding."""
        buffer = transfers.send(self.contents, sharding)
        self.sharding = sharding
        self.buffer = buffer


def unsent(layout: Layout, contents: NDArray[np.generic]) -> Unsent:
    """Return a storage whose contents wait on the host."""
    storage = Unsent()
    storage.layout, storage.contents = layout, contents
    return storage
