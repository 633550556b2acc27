"""The device that runs the graphs, as jax sees it: which one, and its memory."""

from __future__ import annotations

import os

import jax

from lazytpu.lowering.registry import target_platform


def device() -> jax.Device:
    """The device that runs the graphs: jax's default."""
    return jax.devices()[0]


def platform() -> str:
    """``cpu``, ``gpu`` or ``tpu``."""
    return target_platform()


def memory_allocated() -> int:
    """Bytes of buffers alive on the device."""
    return sum(x.nbytes for x in jax.live_arrays() if not x.is_deleted())


def memory_peak() -> int:
    """Most bytes in use at one time, where the platform reports it; else `memory_allocated`."""
    stats = device().memory_stats() or {}
    return int(stats.get("peak_bytes_in_use", memory_allocated()))


def memory_limit() -> int:
    """Bytes of memory of the device, where the platform reports it; else of the machine."""
    stats = device().memory_stats() or {}
    return int(stats.get("bytes_limit", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")))
