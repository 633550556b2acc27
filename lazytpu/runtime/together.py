"""Wait for what several processes compute together.

Python's signals are taken while a process waits, and so is the news that another one has died: what waits inside of XLA
hears neither.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Sequence
from types import TracebackType

from lazytpu.config import config
from lazytpu.errors import WorldError
from lazytpu.observe import logs
from lazytpu.runtime import world
from lazytpu.runtime.client import Buffer
from lazytpu.runtime.host.interrupts import deferred

_SHORTEST_S, _LONGEST_S = 2e-5, 2e-3  # between two looks at a buffer that is waited for
_AT_EXIT_S = 1.0

_latest: list[Buffer] = []  # a result of the program that was started last
_failed: list[bool] = []  # not empty once an exception has ended the program


def remember(result: Buffer) -> None:
    """Note what was started last, for the end of this process."""
    _latest[:] = [result]


def wait(buffers: Sequence[Buffer]) -> None:
    """Wait until buffers are computed.

    Raises:
        WorldError: a rank died meanwhile, or does not answer for too long; or a signal came.
    """
    for buffer in buffers:
        pause, asked = _SHORTEST_S, time.monotonic()
        while not is_ready(buffer):
            world.ranks().check()
            if deferred:
                raise WorldError("interrupted while waiting for the device")
            if time.monotonic() - asked > config.collective_timeout:
                _ask_all()
                asked = time.monotonic()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_S)
        try:
            buffer.block_until_ready()
        except (RuntimeError, ValueError):  # Gloo's are the latter
            _raise_if_dead()
            raise


def has_failed() -> bool:
    """Return whether an exception has ended the program."""
    return bool(_failed)


def is_ready(buffer: Buffer) -> bool:
    """Return whether a buffer is computed, or gone."""
    return buffer.is_deleted() or bool(vars(type(buffer))["is_ready"](buffer))  # which jax's stubs leave out


def _raise_if_dead() -> None:
    """Raise where a rank has died; the news comes a moment later than the failure of its connections."""
    world.ranks().await_end(1, 2.0)
    world.ranks().check()


def _ask_all() -> None:
    """Raise where a rank does not answer; say where the others are that let the device wait."""
    others = world.ranks()
    places = others.places(range(others.size))
    silent = [rank for rank, place in places.items() if "does not answer" in place and rank not in others.gone]
    if silent:
        raise WorldError(
            f"rank {others.rank} waited {config.collective_timeout} s for a collective on the device",
            given="\n        ".join(places[rank] for rank in silent[:8]),
            fix="see why it is stopped; lazytpu.config.collective_timeout has the limit",
        )
    text = "; ".join(list(places.values())[:8])
    logs.note(
        "world", "rank %d waits for a collective on the device: %s", others.rank, text, level=logs.LEVELS["warning"]
    )


def _note_failures() -> None:
    """Remember from now on that an exception has ended the program, for its end."""
    hook = sys.excepthook

    def note(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _failed[:] = [True]
        hook(kind, error, trace)

    sys.excepthook = note
    atexit.register(_end, os.getpid())


def _end(process: int) -> None:
    """End the process at once where XLA still waits for a rank that will not come: its own end would wait as well."""
    if os.getpid() != process:  # a forked one
        return
    deadline = time.monotonic() + _AT_EXIT_S
    for buffer in _latest:
        while not is_ready(buffer):
            stuck = bool(_failed) or bool(world.ranks().dead())
            if stuck and time.monotonic() > deadline:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(1)
            time.sleep(_LONGEST_S)
    _latest.clear()
    if not _failed:
        world.ranks().leave()


world.when_connected(_note_failures)
