"""Look a graph up in the disk cache, and write back what was compiled."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from lazytpu.config import config
from lazytpu.ir.graph import Graph
from lazytpu.observe import metrics
from lazytpu.runtime.disk_cache import claims, prefetch, serialized, store
from lazytpu.runtime.disk_cache.provenance import is_portable
from lazytpu.runtime.host.interrupts import uninterrupted

_MADE_BY = "made_by"  # in the header of a file

# XLA takes up to a tenth of the time that compiling took to serialize a program, and Python stands still meanwhile.  A
# moment later the program runs, and whoever needs its results waits for them anyway.
_HEAD_START_S = 0.02
_writer = ThreadPoolExecutor(1, "lazytpu-store")
_written: deque[Future[None]] = deque(maxlen=100)


def key_of(graph: Graph) -> str:
    """Return the disk cache's key of a graph; empty where it is off, graphs are dumped, or this one cannot be kept."""
    # A dump wants the positions of ops, which one on disk does not have.
    if not config.disk_cache or config.dump:
        return ""
    key = serialized.key_of(graph, jax.local_devices()[0]) if is_portable(graph) else ""
    if not key:
        metrics.count("disk_skipped")
    return key


def find(
    key: str,
    donated: Sequence[serialized.Typed],
    retained: Sequence[serialized.Typed],
    scalars: Sequence[serialized.Typed | None],
) -> tuple[Any, float] | None:
    """Return the executable of an earlier process and the seconds it took to load, or None.

    Args:
        key: from `key_of`.
        donated, retained, scalars: types of the arguments, as `serialized.revived` takes them.
    """
    if not key:
        return None
    start = time.perf_counter()
    found = prefetch.take(key) or store.read_entry(key)
    if found is None:
        return None
    found[0].pop(_MADE_BY, None)
    try:
        with uninterrupted(), jax.enable_x64(True):
            compiled = serialized.revived(found[0], found[1], donated, retained, scalars)
    except serialized.CannotLoad as error:
        store.reject(key, str(error))
        return None
    seconds = time.perf_counter() - start
    prefetch.used(key, compiled=False)
    metrics.count("disk_hit")
    metrics.add_time("load", seconds)
    return compiled, seconds


def keep(key: str, compiled: object) -> None:
    """Keep an executable for other processes; a thread writes it, which the end of this process waits for."""
    if not key:
        return
    prefetch.used(key, compiled=True)
    try:
        _written.append(_writer.submit(_write, key, compiled))
    except RuntimeError:  # the interpreter is ending
        _write(key, compiled)


def settle() -> None:
    """Wait until all that was compiled so far is on disk."""
    while _written:
        _written.popleft().result()


def _write(key: str, compiled: Any) -> None:
    time.sleep(_HEAD_START_S)
    start = time.perf_counter()
    try:
        with prefetch.busy:
            found = serialized.dump(compiled)
            if found is None:
                metrics.count("disk_skipped")
            else:
                store.store(key, {**found[0], _MADE_BY: serialized.made_by(jax.local_devices()[0])}, found[1])
    finally:
        if claims.held:
            claims.end(key)
    metrics.add_time("store", time.perf_counter() - start)


def difference(key: str) -> str:
    """Return which setting or version changed since the graph was kept on disk; empty where it never was.

    Example:
        ``jax was 0.9.0 and is 0.10.2``
    """
    if not key:
        return ""
    now = serialized.made_by(jax.local_devices()[0])
    for header in store.akin(key, serialized.IDENTITY):
        then = header.get(_MADE_BY)
        if isinstance(then, dict):
            return ", ".join(f"{n} was {then.get(n)} and is {v}" for n, v in now.items() if then.get(n) != v)
    return ""
