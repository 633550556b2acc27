"""What the process holds."""

from __future__ import annotations

import gc
import os
from dataclasses import dataclass
from pathlib import Path

import jax

_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Held:
    """What the process holds, garbage collected.

    Attributes:
        rss_mb: resident memory in MiB.
        buffers: arrays of jax that are alive.
        objects: Python objects that the garbage collector tracks.
    """

    rss_mb: float
    buffers: int
    objects: int


def held() -> Held:
    """What the process holds now."""
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE
    return Held(resident / 2**20, len(jax.live_arrays()), len(gc.get_objects()))
