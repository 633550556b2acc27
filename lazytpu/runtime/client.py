"""Name the device that runs the graphs, as jax sees it, its memory, and how arrays get there."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from functools import cache as remembered
from math import prod
from typing import TypeAlias

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import SingleDeviceSharding

from lazytpu.lowering.registry import target_platform
from lazytpu.runtime import world

Buffer: TypeAlias = jax.Array
"""What is on the device: the contents of a storage, an operand or result of a program."""
_HostArray = npt.NDArray[np.generic]
ScalarArray: TypeAlias = _HostArray | jax.Array | None
Scalars: TypeAlias = Sequence[ScalarArray]
"""The scalar inputs of a step: floats, ints and complex numbers, None for a kind there is none of."""


def device() -> jax.Device:
    """Return the device of this process that runs the graphs of one device: jax's default."""
    if world.awaited:
        world.connect()
    return jax.local_devices()[0]


def platform() -> str:
    """Return ``cpu``, ``gpu`` or ``tpu``."""
    if world.awaited:
        world.connect()
    return target_platform()


def put(arrays: Sequence[_HostArray | Buffer]) -> list[jax.Array]:
    """Return a buffer on the device with the contents of each array; on CPUs it may share the array's memory.

    Call it inside ``jax.enable_x64(True)``.
    """
    one = _put_one(device())
    return [one(x) for x in arrays]


@remembered
def _put_one(where: jax.Device) -> Callable[[_HostArray | Buffer], jax.Array]:
    """Return what puts an array on a device: what ``jax.device_put`` calls in the end, where this jax has it.

    The rest of ``device_put`` costs twenty times as much as the transfer of a small array.
    """

    def public(array: _HostArray | Buffer) -> jax.Array:
        made: jax.Array = jax.device_put(array, where)
        return made

    try:
        batched = importlib.import_module("jax._src.lib").xla_client.batched_device_put
        shaped, placed, devices = jax.core.ShapedArray, SingleDeviceSharding(where), [where]

        def direct(array: _HostArray | Buffer) -> jax.Array:
            made: jax.Array = batched(shaped(array.shape, array.dtype), placed, [array], devices, True)
            return made

        probe = np.arange(6.0, dtype=np.float32).reshape(2, 3)
        made, expected = direct(probe), public(probe)
        same = all(getattr(made, name) == getattr(expected, name) for name in ("aval", "sharding", "committed"))
        return direct if same and np.array_equal(np.asarray(made), probe) else public
    except Exception:  # another version of jax
        return public


def memory_allocated() -> int:
    """Return the bytes of buffers alive on the devices of this process, the parts of those that lie on a mesh."""
    if world.awaited:
        return 0
    return sum(_local_bytes(x) for x in jax.live_arrays() if not x.is_deleted())


def _local_bytes(x: jax.Array) -> int:
    if len(x.sharding.device_set) == 1:
        return int(x.nbytes)
    return prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize * len(x.sharding.addressable_devices)


def memory_peak() -> int:
    """Return the most bytes in use at one time, where the platform reports it; else `memory_allocated`."""
    stats = device().memory_stats() or {}
    return int(stats.get("peak_bytes_in_use", memory_allocated()))


def memory_limit() -> int:
    """Return the bytes of memory of the device, where the platform reports it; else of the machine."""
    stats = device().memory_stats() or {}
    return int(stats.get("bytes_limit", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")))
