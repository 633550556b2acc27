"""What an asynchronous collective returns: recorded already, so nothing is left to wait for, but what was received."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from lazytpu.dispatch import exchange
from lazytpu.ir.op_schema import Arg

_PATIENCE_S, _LOOK_S = 1.0, 0.0002

_work_of: Callable[[torch.futures.Future[object]], Arg] = vars(c10d)["_create_work_from_future"]


def done(results: object) -> Arg:
    """Return the work of a collective that is recorded, with its results."""
    future: torch.futures.Future[object] = torch.futures.Future()
    future.set_result(results)
    return _work_of(future)


class Awaited(dist.Work):
    """The work of something on the host, whose result goes to the device when it is waited for.

    Args:
        works: what the host does.
        finish: called once, when they have ended.
        results: of its future.
    """

    def __init__(self, works: list[dist.Work], finish: Callable[[], None], results: object) -> None:
        super().__init__()
        self._works, self._finish, self._results = works, finish, results
        self._ended = False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for the host's part, and take its result."""
        if not self._ended:
            for work in self._works:
                work.wait(timeout) if timeout else work.wait()
            self._ended = True
            self._finish()
        return True

    def is_completed(self) -> bool:
        """Return whether waiting would return at once."""
        return self._ended or all(work.is_completed() for work in self._works)

    def _source_rank(self) -> int:
        return self._works[0]._source_rank()

    def get_future(self) -> torch.futures.Future[object]:
        """Return a future of the results; waits for them."""
        self.wait()
        future: torch.futures.Future[object] = torch.futures.Future()
        future.set_result(self._results)
        return future


class Patient(Awaited):
    """The work of something on the host in the middle of a step, which is not cut for it unless others are late.

    These may wait for the collectives that this process has recorded and not started.
    """

    def __init__(self, work: dist.Work, results: object) -> None:
        super().__init__([work], lambda: None, results)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait; start what is recorded if that takes long."""
        late = time.monotonic() + _PATIENCE_S
        while not self.is_completed() and time.monotonic() < late:
            time.sleep(_LOOK_S)
        if not self.is_completed():
            exchange.settle()
        return super().wait(timeout)
