"""Name the device that runs the graphs, as jax sees it, and its memory."""

from __future__ import annotations

import os

import jax

from lazytpu.lowering.registry import target_platform


def device() -> jax.Device:
    """Return the device that runs the graphs: jax's default."""
    return jax.devices()[0]


def platform() -> str:
    """Return ``cpu``, ``gpu`` or ``tpu``."""
    return target_platform()


def memory_allocated() -> int:
    """Return the bytes of buffers alive on the device."""
    return sum(x.nbytes for x in jax.live_arrays() if not x.is_deleted())


def memory_peak() -> int:
    """Return the most bytes in use at one time, where the platform reports it; else `memory_allocated`."""
    stats = device().memory_stats() or {}
    return int(stats.get("peak_bytes_in_use", memory_allocated()))


def memory_limit() -> int:
    """Return the bytes of memory of the device, where the platform reports it; else of the machine."""
    stats = device().memory_stats() or {}
    return int(stats.get("bytes_limit", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")))
