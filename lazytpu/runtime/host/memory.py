"""The memory of the process: the heap that programs take their temporaries from, and the mappings their code takes.

XLA's executables on the CPU take their temporaries from malloc in each run.  glibc gives large ones back to the
system at once, which has to fill every page with zeros before it is used again: a tenth to a quarter of a step
(docs/explanation/performance.md, benchmarks/allocation.py).  Three settings of glibc make it keep blocks of up to
64 MiB, and XLA is asked to take its temporaries in several blocks where they are larger.  The settings are those of the
whole process; `lazytpu.config.reuse_pages` leaves them as they are when it is off.

Every kernel of such an executable takes memory mappings, of which Linux gives a process a limited number
(vm.max_map_count, 65,530 by default).  Past it LLVM can compile nothing any more.  So they are counted after every few
new executables, and executables are forgotten when too many are in use.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import jax

from lazytpu.config import config
from lazytpu.observe import metrics
from lazytpu.runtime import client
from lazytpu.runtime.least_recent import LeastRecent

_HEAP_BYTES = 64 << 20  # glibc's HEAP_MAX_SIZE: the size of a thread's heaps; a larger block gets a mapping of its own
_OLD_LIMIT = 32 << 20  # before glibc 2.35 no larger threshold was taken
_GROWN = 128 << 20
BLOCK_BYTES = 30 << 20  # the temporaries that XLA may put into one block: two of them fit in a heap
_LARGE = 256 << 20  # bytes; what is smaller is there
_ALONE = 128 << 20  # bytes of temporaries from which no two programs should have theirs at once

_COUNT_EVERY = 4
_SHARE = 0.5
_LEAST_KEPT = 8

# malloc.h
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3

_kept = False
_size = 0  # of the process when memory was last given back


def keep_heap() -> None:
    """Make malloc keep what is freed from now on, and give back what compiling and interpreting left free.

    Called when a new program for the CPU is about to run.  A thread's free heap is unmapped unless the one before it
    has less than the padding left, so the padding is a whole heap.  Untouched padding takes no memory.  Giving back
    takes some ten milliseconds, so it waits until the process has grown.
    """
    global _kept, _size
    if not reuses_pages():
        return
    libc = ctypes.CDLL(None)
    if not _kept:
        libc.mallopt(_M_MMAP_THRESHOLD, _HEAP_BYTES) or libc.mallopt(_M_MMAP_THRESHOLD, _OLD_LIMIT)
        libc.mallopt(_M_TRIM_THRESHOLD, 4 * _HEAP_BYTES)
        libc.mallopt(_M_TOP_PAD, _HEAP_BYTES)
        _kept = True
    if _resident() > _size + _GROWN:
        libc.malloc_trim(0)
        _size = _resident()


def _resident() -> int:
    """Return the bytes of memory that this process takes; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    except (OSError, ValueError, IndexError):
        return 0


@cache
def reuses_pages() -> bool:
    """Return whether temporaries keep their memory: it is wanted, and the C library is glibc without other settings."""
    own = any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.environ.get(
        "GLIBC_TUNABLES", ""
    )
    if not config.reuse_pages or own or sys.platform != "linux":
        return False
    return hasattr(ctypes.CDLL(None), "gnu_get_libc_version")


def needed(compiled: object) -> tuple[int, bool]:
    """Return the bytes that a program takes beside its inputs, if they are many and memory is the host's; else 0.

    Also return whether its temporaries are so large that it should wait until the program before it has freed its own.
    """
    if client.platform() != "cpu" or not isinstance(compiled, jax.stages.Compiled):
        return 0, False
    found = compiled.memory_analysis()
    if not found:
        return 0, False
    needs = found.output_size_in_bytes - found.alias_size_in_bytes + found.temp_size_in_bytes
    return int(needs) if needs >= _LARGE else 0, found.temp_size_in_bytes >= _ALONE


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
