"""Saving one checkpoint from several processes: each does its piece of work, and all get the results."""

from __future__ import annotations

import base64
import pickle
import zlib
from collections.abc import Callable
from itertools import count
from typing import TypeVar, cast

import torch.distributed as dist

from lazytpu.errors import LazyTPUError
from lazytpu.runtime import world
from lazytpu.runtime.ranks import named

_T = TypeVar("_T")
_LIMIT_S = 24 * 3600.0  # of writing; a process that dies is noticed at once
_saves = count()


class SharedSave:
    """One save, in which all processes take part; made where each of them asks for it.

    They speak through the coordinator, which needs no collective, so a thread can; where the processes are connected
    by ``torch.distributed`` alone, through that.

    Attributes:
        rank, size: of this process, and how many there are.
    """

    def __init__(self) -> None:
        self._name, self._steps = f"checkpoint.{next(_saves)}", count()
        self._world = world.is_connected()
        connected = self._world or not dist.is_initialized()
        self.rank = world.rank() if connected else dist.get_rank()
        self.size = (world.size() if self._world else 1) if connected else dist.get_world_size()

    def share(self, work: Callable[[], _T]) -> list[_T]:
        """Do a piece of work, in each process its own; return what it gave, in the order of ranks.

        Raises:
            Exception: what the work raised here.
            LazyTPUError: it failed in another process.
        """
        error: Exception | None = None
        found: _T | None = None
        try:
            found = work()
        except Exception as raised:
            error = raised
        every = self._every((found, None if error is None else f"{type(error).__name__}: {error}"))
        if error is not None:
            raise error
        failed = {rank: text for rank, (_, text) in enumerate(every) if text}
        if failed:
            first = min(failed)
            raise LazyTPUError(f"{named(failed)} could not save the checkpoint", given=failed[first])
        return [cast(_T, value) for value, _ in every]

    def _every(self, value: tuple[_T | None, str | None]) -> list[tuple[_T | None, str | None]]:
        if self.size == 1:
            return [value]
        if not self._world:
            every: list[tuple[_T | None, str | None]] = [(None, None)] * self.size
            dist.all_gather_object(every, value)
            return every
        text = base64.b85encode(zlib.compress(pickle.dumps(value))).decode()
        tag = f"{self._name}.{next(self._steps)}"
        told = world.ranks().tell(tag, range(self.size), {"checkpoint": [text]}, "saving a checkpoint", _LIMIT_S)
        return [pickle.loads(zlib.decompress(base64.b85decode(told[r]["checkpoint"][0]))) for r in range(self.size)]
