"""Buffers on a mesh: put them there, find out how they lie, take their parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np

from lazytpu.ir.graph import Graph
from lazytpu.ir.sharding import Mesh, Sharding
from lazytpu.lowering import target
from lazytpu.lowering.support import shardings
from lazytpu.observe import metrics
from lazytpu.runtime import client, described
from lazytpu.runtime.host.interrupts import uninterrupted

used: list[bool] = []
"""Not empty once a buffer of this process was put on a mesh: `in_use` without a call."""


def in_use() -> bool:
    """Return whether any buffer of this process was put on a mesh."""
    return bool(used)


def devices() -> tuple[int, ...]:
    """Return the ids of all devices of all processes."""
    client.platform()  # connects the processes
    return tuple([device.id for device in target.devices()])


def hlo_sharding(sharding: Sharding) -> str:
    """Return a sharding as XLA writes it: ``{devices=[2,4]<=[8]}``."""
    return str(shardings.named(sharding)._to_xla_hlo_sharding(len(sharding.spec)))


def devices_by_process() -> list[list[int]]:
    """Return the ids of the devices of each process."""
    client.platform()
    found: dict[int, list[int]] = {}
    for device in target.devices():
        found.setdefault(device.process_index, []).append(device.id)
    return [found[index] for index in sorted(found)]


def check(mesh: Mesh) -> None:
    """Raise where a mesh has a device that does not exist.

    Raises:
        ValueError: there is no device of one of the ids.
    """
    shardings.mesh_of(mesh)


def put(buffer: jax.Array, sharding: Sharding | None, size: tuple[int, ...]) -> jax.Array:
    """Return a buffer laid out on a mesh, or on one device where there is no sharding.

    Args:
        buffer: with the contents of a tensor, wherever it lies.
        sharding: how it is to lie.
        size: of the tensor; a buffer is larger where its sizes do not divide.
    """
    if described.is_described(buffer):
        shape, place = (size, None) if sharding is None else (sharding.padded(size), shardings.named(sharding))
        return described.buffer_of(shape, buffer.dtype, place)
    where = client.device() if sharding is None else shardings.named(sharding)
    metrics.count("resharded")
    used[:] = [True]
    with uninterrupted(), jax.enable_x64(True):
        whole = whole_of(buffer, size)
        if sharding is not None and sharding.padded(size) != size:
            whole = _padded(whole, sharding)
        found: jax.Array = jax.device_put(whole, where)
    return found


def whole_of(buffer: jax.Array, size: tuple[int, ...]) -> jax.Array:
    """Return a buffer of the sizes of its tensor: without the padding of dimensions that do not divide."""
    if buffer.shape == size:
        return buffer
    if described.is_described(buffer):
        return described.buffer_of(size, buffer.dtype, buffer.sharding)
    with uninterrupted(), jax.enable_x64(True):
        return _cropped(buffer, size)


# Made once, so that jax compiles one for each type.
_padded: Callable[[jax.Array, Sharding], jax.Array] = jax.jit(shardings.padded, static_argnums=1)
_cropped: Callable[[jax.Array, tuple[int, ...]], jax.Array] = jax.jit(shardings.cropped, static_argnums=1)


def sharding_of(buffer: jax.Array, mesh: Mesh) -> Sharding | None:
    """Return how the result of a graph on a mesh lies; None where every device has all of it."""
    found = buffer.sharding
    if found.is_fully_replicated or not isinstance(found, jax.sharding.NamedSharding):
        return None
    return shardings.known(found, buffer.ndim, mesh)


def taken(buffer: jax.Array) -> Sharding:
    """Return how an array of somebody else's lies, whose sharding is a ``NamedSharding``."""
    used[:] = [True]
    assert isinstance(buffer.sharding, jax.sharding.NamedSharding)
    return shardings.known(buffer.sharding, buffer.ndim, None)


def placed(graph: Graph, buffers: Sequence[jax.Array]) -> list[jax.Array]:
    """Return the inputs of a graph where it takes them: what has no sharding on all devices of its mesh, or on one."""
    if graph.mesh is None:
        return [on_one_device(x) for x in buffers]
    everywhere = shardings.replicated(graph.mesh)
    found = list(buffers)
    for i, value in enumerate(graph.inputs):
        if value.sharding is None and not _lies(found[i], everywhere):
            metrics.count("replicated")
            found[i] = _everywhere(found[i], everywhere)
    return found


def _everywhere(buffer: jax.Array, where: jax.sharding.Sharding) -> jax.Array:
    if described.is_described(buffer):
        return described.buffer_of(buffer.shape, buffer.dtype, where)
    with uninterrupted(), jax.enable_x64(True):
        found: jax.Array = jax.device_put(buffer, where)
    return found


def _lies(buffer: jax.Array, where: jax.sharding.Sharding) -> bool:
    return buffer.sharding is where or bool(buffer.sharding.is_equivalent_to(where, buffer.ndim))


def on_one_device(buffer: jax.Array) -> jax.Array:
    """Return a buffer that a graph of one device can take: the part on the first one, of a tensor that all have."""
    if len(buffer.sharding.device_set) == 1:
        return buffer
    if described.is_described(buffer):
        return described.buffer_of(buffer.shape, buffer.dtype)
    here = client.device()
    found: jax.Array
    for shard in buffer.addressable_shards:
        if shard.device == here:
            found = shard.data
            return found
    with uninterrupted(), jax.enable_x64(True):
        found = jax.device_put(buffer, here)
    return found


def parts_of(
    buffer: jax.Array, size: tuple[int, ...]
) -> list[tuple[int, tuple[slice, ...], np.typing.NDArray[np.generic]]]:
    """Return the parts that this process has: the id of the device, what of the tensor it is, and its contents."""
    found = []
    for shard in buffer.addressable_shards:
        index = tuple([slice(*s.indices(n)[:2]) for s, n in zip(shard.index, buffer.shape, strict=True)])
        cut = tuple([slice(min(s.start, n), min(s.stop, n)) for s, n in zip(index, size, strict=True)])
        inside = tuple([slice(0, s.stop - s.start) for s in cut])
        found.append((shard.device.id, cut, np.asarray(shard.data)[inside]))
    return sorted(found, key=lambda part: part[0])
