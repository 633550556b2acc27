"""Keep the pages of memory that large temporaries leave behind for the next step.

XLA's executables on the CPU take their temporaries from malloc in each run.  glibc gives large ones back to the
system at once, which has to fill every page with zeros before it is used again: a quarter to a third of a step
(docs/explanation/performance.md, benchmarks/allocation.py).  Three settings of glibc make it keep them.  They are
those of the whole process, and slow down programs of many small ops, so `lazytpu.config.reuse_pages` is off by default.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable

from lazytpu.config import config

_KEPT_BYTES = 1 << 30  # larger ones go back to the system, and so does free memory past this much at the heap's end
_OLD_LIMIT = 32 << 20  # before glibc 2.35 no larger threshold was taken

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


def keep() -> None:
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
