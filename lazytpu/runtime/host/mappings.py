"""Limit the memory mappings in use: every kernel of an executable on the CPU takes some.

Linux gives a process a limited number of them (vm.max_map_count, 65,530 by default).  Past it LLVM can compile
nothing any more.  So they are counted after every few new executables, and executables are forgotten when too many
are in use.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

from lazytpu.observe import metrics
from lazytpu.runtime.least_recent import LeastRecent

_COUNT_EVERY = 4
_SHARE = 0.5
_LEAST_KEPT = 8


def make_room(executables: LeastRecent[object, Any]) -> None:
    """Forget the least recently used executables while they take too many mappings.

    Called after each new one; looks after a few only.
    """
    if (metrics.counter("compile") + metrics.counter("disk_hit")) % _COUNT_EVERY:
        return
    while len(executables) > _LEAST_KEPT and in_use() > limit() * _SHARE:
        for _ in range(max(1, len(executables) // 4)):
            executables.popitem(last=False)
            metrics.count("executables_forgotten")


def in_use() -> int:
    """Return the number of memory mappings of this process; 0 where the system does not say."""
    try:
        with open("/proc/self/maps", "rb") as maps:
            return maps.read().count(b"\n")
    except OSError:
        return 0


@cache
def limit() -> int:
    """Return how many this process may have."""
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        return sys.maxsize
