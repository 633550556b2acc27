"""Start programs that several processes run together, and wait for what they compute.

Python's signals are taken while a process waits, and so is the news that another one has died: what waits inside of XLA
hears neither.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from lazytpu.ir.graph import Graph
from lazytpu.lowering.support import shardings
from lazytpu.runtime import world
from lazytpu.runtime.client import Buffer, ScalarArray
from lazytpu.runtime.host.chatter import silenced

_SHORTEST_S, _LONGEST_S = 2e-5, 2e-3  # between two looks at a buffer that is waited for
_AT_EXIT_S = 1.0

_latest: list[Buffer] = []  # a result of the program that was started last
_failed: list[bool] = []  # not empty once an exception has ended the program


def is_shared(graph: Graph) -> bool:
    """Return whether several processes run the program of a graph."""
    if not world.is_connected():
        return False
    return any(not shardings.replicated(mesh).is_fully_addressable for mesh in graph.meshes)


class Together:
    """Starts a program that several processes run, in place of the ``jax.stages.Compiled`` it wraps.

    Attributes:
        inner: what it wraps.
    """

    def __init__(self, graph: Graph, inner: Callable[..., Sequence[Buffer]], smallest: int) -> None:
        self.graph, self.inner, self._smallest = graph, inner, smallest
        self._connected = False

    def __call__(
        self, donated: Sequence[Buffer], retained: Sequence[Buffer], *scalars: ScalarArray
    ) -> Sequence[Buffer]:
        world.ranks().check()
        if self._connected:
            return self._start(donated, retained, *scalars)
        with silenced():
            results = self._start(donated, retained, *scalars)
            wait(results)
        self._connected = True
        return results

    def _start(self, donated: Sequence[Buffer], retained: Sequence[Buffer], *scalars: ScalarArray) -> Sequence[Buffer]:
        results = self.inner(donated, retained, *scalars)
        if results:
            _latest[:] = [results[self._smallest]]
        return results

    def __getattr__(self, name: str) -> object:  # texts and costs
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.inner, name)


def wait(buffers: Sequence[Buffer]) -> None:
    """Wait until buffers are computed.

    Raises:
        WorldError: a rank died meanwhile.
    """
    for buffer in buffers:
        pause = _SHORTEST_S
        while not _is_ready(buffer):
            world.ranks().check()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_S)
        buffer.block_until_ready()


def _is_ready(buffer: Buffer) -> bool:
    return bool(vars(type(buffer))["is_ready"](buffer))  # which jax's stubs leave out


def note_failures() -> None:
    """Remember from now on that an exception has ended the program, for its end.  Called once the world is there."""
    hook = sys.excepthook

    def note(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _failed[:] = [True]
        hook(kind, error, trace)

    sys.excepthook = note
    atexit.register(_end)


def _end() -> None:
    """End the process at once where XLA still waits for a rank that will not come: its own end would wait as well."""
    deadline = time.monotonic() + _AT_EXIT_S
    stuck = bool(world.ranks().dead()) or bool(_failed)
    for buffer in _latest:
        while not buffer.is_deleted() and not _is_ready(buffer):
            if stuck and time.monotonic() > deadline:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(1)
            stuck = stuck or bool(world.ranks().dead())
            time.sleep(_LONGEST_S)
    _latest.clear()


world.when_connected(note_failures)
