"""Buffers on a mesh: put them there, find out how they lie, take their parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import jax
import numpy as np

from lazytpu.errors import LazyTPUError
from lazytpu.ir.graph import Graph
from lazytpu.ir.sharding import Mesh, Sharding
from lazytpu.lowering import target
from lazytpu.lowering.support import shardings
from lazytpu.observe import metrics
from lazytpu.runtime import client, comparison, described, together
from lazytpu.runtime.host.chatter import silenced
from lazytpu.runtime.host.interrupts import uninterrupted

used: list[bool] = []
"""Not empty once the global view is chosen, as by putting a buffer on a mesh; a list, so that asking takes no call."""


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


def put(
    buffer: jax.Array | np.typing.NDArray[np.generic], sharding: Sharding | None, size: tuple[int, ...]
) -> jax.Array:
    """Return a buffer laid out on a mesh, or on one device where there is no sharding.

    Args:
        buffer: with the contents of a tensor, wherever it lies; an array of the host may be aliased.
        sharding: how it is to lie.
        size: of the tensor; a buffer is larger where its sizes do not divide.
    """
    if not isinstance(buffer, np.ndarray) and described.is_described(buffer):
        shape, place = (size, None) if sharding is None else (sharding.padded(size), shardings.named(sharding))
        return described.buffer_of(shape, buffer.dtype, place)
    where = client.device() if sharding is None else shardings.named(sharding)
    metrics.count("resharded")
    used[:] = [True]
    with uninterrupted(), jax.enable_x64(True):
        whole = buffer if isinstance(buffer, np.ndarray) else whole_of(buffer, size)
        if sharding is not None and (sizes := sharding.padded(size)) != size:
            if isinstance(whole, np.ndarray):
                whole = np.pad(whole, [(0, n - m) for n, m in zip(sizes, size, strict=True)])
            else:
                whole = _padded(whole, sharding)
        return laid_out(whole, where)


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


def over_processes(mesh: Mesh) -> bool:
    """Return whether a mesh has devices of other processes."""
    return not shardings.replicated(mesh).is_fully_addressable


class DoesNotDivide(ValueError):
    """The part of a process cannot be split evenly among its devices."""


def from_parts(part: np.typing.NDArray[np.generic], sharding: Sharding) -> jax.Array:
    """Return an array of which each process of a mesh has a part.

    Args:
        part: of this process: along each dimension what the devices of this process have together.
        sharding: how the whole lies.

    Raises:
        DoesNotDivide: a size cannot be split evenly.
    """
    where = shardings.named(sharding)
    indices = where.addressable_devices_indices_map(sharding.parts).values()
    for dim, size in enumerate(part.shape):
        count = len({(index[dim].start, index[dim].stop) for index in indices if index is not None})
        if size % count:
            raise DoesNotDivide(f"{size} rows of this process do not divide by {count} in {sharding}")
    used[:] = [True]
    with uninterrupted(), jax.enable_x64(True):
        made: jax.Array = jax.make_array_from_process_local_data(where, part)
    return made


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
    """Return the inputs of a graph where it takes them."""
    if graph.mesh is None:
        return [on_one_device(x) for x in buffers]
    where = shardings.replicated(graph.mesh)
    pairs = zip(graph.inputs, buffers, strict=True)
    return [x if v.sharding is not None or x.sharding is where else _everywhere(x, where) for v, x in pairs]


def taken_by(mesh: Mesh | None, buffer: jax.Array) -> jax.Array:
    """Return an input without a sharding where a graph takes it: on all devices of its mesh, or on one."""
    return on_one_device(buffer) if mesh is None else _everywhere(buffer, shardings.replicated(mesh))


def _everywhere(buffer: jax.Array, where: jax.sharding.Sharding) -> jax.Array:
    if _equivalent(buffer.sharding, where, buffer.ndim):
        return buffer
    metrics.count("replicated")
    if described.is_described(buffer):
        return described.buffer_of(buffer.shape, buffer.dtype, where)
    with uninterrupted(), jax.enable_x64(True):
        return laid_out(buffer, where)


@cache
def _equivalent(these: jax.sharding.Sharding, those: jax.sharding.Sharding, ndim: int) -> bool:
    return these is those or bool(these.is_equivalent_to(those, ndim))


def on_one_device(buffer: jax.Array) -> jax.Array:
    """Return a buffer that a graph of one device can take: the part on the first one, of a tensor that all have."""
    if len(buffer.sharding.device_set) == 1:
        return buffer
    if described.is_described(buffer):
        return described.buffer_of(buffer.shape, buffer.dtype)
    here = client.device()
    for shard in buffer.addressable_shards:
        if shard.device == here:
            found: jax.Array = shard.data
            return found
    with uninterrupted(), jax.enable_x64(True):
        return laid_out(buffer, here)


def laid_out(buffer: jax.Array | np.typing.NDArray[np.generic], where: jax.Device | jax.sharding.Sharding) -> jax.Array:
    """Return a buffer with the same contents elsewhere; call it inside ``jax.enable_x64(True)``.

    Where devices of several processes have a part in it, all of these processes call this together.
    """
    elsewhere = isinstance(where, jax.sharding.Sharding) and not where.is_fully_addressable
    found: jax.Array
    if isinstance(buffer, np.ndarray) or buffer.is_fully_addressable:
        found = _from_own(buffer, where) if elsewhere else jax.device_put(buffer, where)
    elif elsewhere:
        found = _together(_moved(where), buffer)
    else:
        found = jax.device_put(whole_here(buffer), where)
    return found


def _from_own(buffer: jax.Array | np.typing.NDArray[np.generic], where: jax.sharding.Sharding) -> jax.Array:
    """Return an array over several processes, each of which has the whole contents."""
    host = np.asarray(buffer)
    comparison.compare_input(host, where)
    indices = where.addressable_devices_indices_map(buffer.shape)
    parts = [jax.device_put(np.array(host[index]), device) for device, index in indices.items()]
    made: jax.Array = jax.make_array_from_single_device_arrays(buffer.shape, where, parts)
    return made


@cache
def _moved(where: jax.sharding.Sharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(_same, out_shardings=where)


def _together(move: Callable[[jax.Array], jax.Array], buffer: jax.Array) -> jax.Array:
    with silenced():
        moved = move(buffer)
        together.wait([moved])
    return moved


def _same(x: jax.Array) -> jax.Array:
    return x


def whole_here(buffer: jax.Array) -> jax.Array:
    """Return a buffer whose contents this process can read.

    Of one that lies in parts on several processes the parts are gathered, which all of these do together.

    Raises:
        LazyTPUError: no device of this process has a part in it.
    """
    if buffer.is_fully_addressable:
        return buffer
    if not buffer.addressable_shards:
        raise LazyTPUError(
            "a tensor that lies on devices of other processes alone cannot be read here",
            given=f"{buffer.shape} on {buffer.sharding}",
            fix="read it in the processes of its mesh",
        )
    if not buffer.is_fully_replicated:
        assert isinstance(buffer.sharding, jax.sharding.NamedSharding)
        with uninterrupted(), jax.enable_x64(True):
            buffer = _together(_moved(shardings.whole(buffer.sharding.mesh)), buffer)
    found: jax.Array = buffer.addressable_shards[0].data
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


def boxes_of(buffer: jax.Array, size: tuple[int, ...]) -> list[tuple[tuple[slice, ...], bool, jax.Array | None]]:
    """Return the different parts of a tensor: what of it each is, whether this process is to save it, and its contents.

    A part that several devices have is listed once, and one process is to save it.  Contents are None where another
    process has them; padding is left out, and so are parts of nothing but padding.
    """
    here = {shard.device: shard.data for shard in buffer.addressable_shards}
    owners: dict[tuple[tuple[int, int], ...], jax.Device] = {}
    contents: dict[tuple[tuple[int, int], ...], jax.Array] = {}
    indices = buffer.sharding.devices_indices_map(buffer.shape)
    known: dict[int, jax.Device] = {device.id: device for device in target.devices()}
    for device in [known[i] for i in sorted(known) if known[i] in indices]:
        index = indices[device]
        bounds = tuple([s.indices(n)[:2] for s, n in zip(index, buffer.shape, strict=True)])
        owners.setdefault(bounds, device)
        if device in here:
            contents.setdefault(bounds, here[device])
    found = []
    for bounds, owner in owners.items():
        inside = tuple([slice(min(a, n), min(b, n)) for (a, b), n in zip(bounds, size, strict=True)])
        if 0 in size or all(s.stop > s.start for s in inside):
            found.append((inside, owner in here, contents.get(bounds)))
    return found


def contents_of(part: jax.Array, box: tuple[slice, ...]) -> np.typing.NDArray[np.generic]:
    """Return the contents of a part without its padding, copied to the host."""
    return np.asarray(part)[tuple([slice(0, s.stop - s.start) for s in box])]


def assembled(
    like: jax.Array, size: tuple[int, ...], part: Callable[[tuple[slice, ...]], np.typing.NDArray[np.generic]]
) -> jax.Array:
    """Return a buffer that lies as another one, of parts from the host, which has one of them at a time.

    Args:
        like: of the same type.
        size: of the tensor.
        part: gives the contents of a part of it.
    """

    def padded(bounds: tuple[tuple[int, int], ...]) -> np.typing.NDArray[np.generic]:
        inside = tuple([slice(min(a, n), min(b, n)) for (a, b), n in zip(bounds, size, strict=True)])
        found = part(inside)
        lacking = [(0, (b - a) - n) for (a, b), n in zip(bounds, found.shape, strict=True)]
        return np.pad(found, lacking) if any(after for _, after in lacking) else found

    holders: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, index in like.sharding.addressable_devices_indices_map(like.shape).items():
        bounds = tuple([s.indices(n)[:2] for s, n in zip(index or (), like.shape, strict=True)])
        holders.setdefault(bounds, []).append(device)
    arrays: list[jax.Array] = []
    with uninterrupted(), jax.enable_x64(True):
        for bounds, devices in holders.items():
            contents = padded(bounds)
            arrays += jax.block_until_ready([jax.device_put(contents, device) for device in devices])
        return jax.make_array_from_single_device_arrays(like.shape, like.sharding, arrays)
