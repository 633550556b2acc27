"""The memory of the process: the heap that programs take their temporaries from, and the mappings their code takes.

XLA's executables on the CPU take their temporaries from malloc in each run.  glibc gives large ones back to the
system at once, which has to fill every page with zeros before it is used again: a quarter to a third of a step
(docs/explanation/performance.md, benchmarks/allocation.py).  Three settings of glibc make it keep them.  They are
those of the whole process, and slow down programs of many small ops, so `lazytpu.config.reuse_pages` is off by default.

Every kernel of such an executable takes memory mappings, of which Linux gives a process a limited number
(vm.max_map_count, 65,530 by default).  Past it LLVM can compile nothing any more.  So they are counted after every few
new executables, and executables are forgotten when too many are in use.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jax

from lazytpu.config import config
from lazytpu.observe import metrics
from lazytpu.runtime import client
from lazytpu.runtime.least_recent import LeastRecent

_KEPT_BYTES = 1 << 30  # larger ones go back to the system, and so does free memory past this much at the heap's end
_OLD_LIMIT = 32 << 20  # before glibc 2.35 no larger threshold was taken
_LARGE = 256 << 20  # bytes; what is smaller is there

_COUNT_EVERY = 4
_SHARE = 0.5
_LEAST_KEPT = 8

# malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8

_kept = False


def share_heap() -> None:
    """Make threads that start from now on take memory from the one heap of the process.

    XLA's threads would otherwise have heaps of their own, which cannot hold large temporaries.  Call it before jax
    starts them.
    """
    setting = _setting()
    if setting is not None:
        setting(_M_ARENA_MAX, 1)


def keep_heap() -> None:
    """Make the heap keep what is freed.  Called when a program for the CPU is about to run; acts once."""
    global _kept
    if _kept:
        return
    _kept = True
    setting = _setting()
    if setting is not None:
        setting(_M_MMAP_THRESHOLD, _KEPT_BYTES) or setting(_M_MMAP_THRESHOLD, _OLD_LIMIT)
        setting(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def _setting() -> Callable[[int, int], int] | None:
    """Return glibc's ``mallopt``; None where it is missing, not wanted, or the user has other settings."""
    own = any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.environ.get(
        "GLIBC_TUNABLES", ""
    )
    if not config.reuse_pages or own or sys.platform != "linux":
        return None
    try:
        return ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return None


def needed(compiled: object) -> int:
    """Return the bytes that a program takes beside its inputs, if they are many and memory is the host's; else 0."""
    if client.platform() != "cpu" or not isinstance(compiled, jax.stages.Compiled):
        return 0
    found = compiled.memory_analysis()
    needs = found.output_size_in_bytes - found.alias_size_in_bytes + found.temp_size_in_bytes if found else 0
    return int(needs) if needs >= _LARGE else 0


def is_there(size: int) -> bool:
    """Return whether the system would give so many bytes; nothing is written to them, so asking costs microseconds.

    Asked before a large program is started: once it runs, a failure loses its donated inputs.
    """
    try:
        mmap.mmap(-1, size).close()
    except (OSError, ValueError, OverflowError):
        return False
    return True


def free_mappings(executables: LeastRecent[object, Any]) -> None:
    """Forget the least recently used executables while they take too many mappings.

    Called after each new one; looks after a few only.
    """
    if (metrics.counter("compile") + metrics.counter("disk_hit")) % _COUNT_EVERY:
        return
    while len(executables) > _LEAST_KEPT and mappings() > most_mappings() * _SHARE:
        for _ in range(max(1, len(executables) // 4)):
            executables.popitem(last=False)
            metrics.count("executables_forgotten")


def mappings() -> int:
    """Return the number of memory mappings of this process; 0 where the system does not say."""
    try:
        with open("/proc/self/maps", "rb") as maps:
            return maps.read().count(b"\n")
    except OSError:
        return 0


@cache
def most_mappings() -> int:
    """Return how many this process may have."""
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        return sys.maxsize
