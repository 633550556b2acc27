"""Give tensors shardings, and look at them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from lazytpu.dtypes import host_tensor
from lazytpu.ir.sharding import Entry
from lazytpu.ir.sharding import Mesh as AnyMesh
from lazytpu.runtime import meshes
from lazytpu.spmd.mesh import Mesh, as_mesh
from lazytpu.tensors.storage import resolve
from lazytpu.tracing import reading, sharding
from lazytpu.tracing.record import cell_of, is_device_tensor

_T = TypeVar("_T", bound=torch.Tensor)


class Sharding(NamedTuple):
    """How a tensor lies.

    Attributes:
        mesh: the devices.
        spec: an entry a dimension: None, an axis of the mesh, or a tuple of axes.
    """

    mesh: Mesh
    spec: tuple[Entry, ...]


@dataclass(frozen=True)
class LocalShard:
    """A part of a tensor that lies on a device of this process.

    Attributes:
        data: its contents, a tensor on the CPU.
        index: what of the whole tensor it is, a slice a dimension.
        device: id of the device.
    """

    data: torch.Tensor
    index: tuple[slice, ...]
    device: int


def mark_sharding(tensor: _T, mesh: AnyMesh, spec: Iterable[Entry]) -> _T:
    """Split a tensor over the devices of a mesh, from here on and in every step.

    It may be an input, a parameter, a buffer, or an intermediate result, whose gradient is then split alike.  What
    overwrites it lies as it does, and so do gradients and the state of optimizers.  Its contents do not change.

    Args:
        tensor: on the device.
        mesh: a `Mesh`, or a ``torch.distributed.DeviceMesh``.
        spec: one entry a dimension: None, the name of an axis, or a tuple of names.  Dimensions without an entry are
            not split.  Sizes need not divide: the parts are padded.  ``...`` leaves a dimension of an intermediate
            result to XLA.

    Returns:
        The tensor itself.

    Raises:
        ValueError: the spec has an axis that the mesh has not, one axis twice, or too many entries.
        TypeError: the tensor is not on the device, the spec is a string, or an entry is something else.
        LazyTPUError: it is a view of a part of another tensor.

    Example:
        >>> lazytpu.spmd.mark_sharding(x, mesh, ("data", None))  # doctest: +SKIP
    """
    if isinstance(spec, str):
        raise TypeError(f"a spec has an entry a dimension: ({spec!r},), not {spec!r}")
    sharding.mark(_on_device("mark_sharding", tensor), as_mesh(mesh), tuple(spec))
    return tensor


def replicate(tensor: _T, mesh: AnyMesh) -> _T:
    """Give every device of a mesh all of a tensor; return the tensor itself.

    Tensors without a sharding are replicated as soon as one with a sharding is in their graph, so this is for those
    that had one, and for intermediate results that are to be gathered.
    """
    return mark_sharding(tensor, mesh, ())


def clear_sharding(tensor: _T) -> _T:
    """Take the sharding of a tensor away, so that its contents are on one device; return the tensor itself."""
    sharding.clear(_on_device("clear_sharding", tensor))
    return tensor


def sharding_of(tensor: torch.Tensor) -> Sharding | None:
    """Return how a tensor lies, None if on one device or if nobody has asked for all of it on each device.

    A view has the sharding of its storage where its dimensions are those of the storage, in any order; else None.
    """
    found = sharding.sharding_of(_on_device("sharding_of", tensor))
    if found is None:
        return None
    mesh = found.mesh
    return Sharding(Mesh(mesh.shape, mesh.axis_names, mesh.devices), found.entries())


def local_shards(tensor: torch.Tensor) -> list[LocalShard]:
    """Return the parts of a tensor that lie on devices of this process, without communication.

    The graph that computes the tensor runs.

    Returns:
        A part a device, in the order of their ids.  Devices that share a part have it each.
    """
    storage, layout = resolve(cell_of(_on_device("local_shards", tensor)))
    order = sharding.permutation(storage.layout, layout)
    if order is None:  # other elements or dimensions than the storage has
        tensor = tensor.detach().clone()
        storage, _ = resolve(cell_of(tensor))
        order = list(range(tensor.dim()))
    buffer = reading.buffer_of(storage, "local_shards")
    return [
        LocalShard(
            host_tensor(np.array(part)).to(tensor.dtype).permute(order), tuple([index[d] for d in order]), device
        )
        for device, index, part in meshes.parts_of(buffer, storage.layout.size)
    ]


def _on_device(name: str, tensor: _T) -> _T:
    if not is_device_tensor(tensor):
        found = f"one on {tensor.device}" if isinstance(tensor, torch.Tensor) else f"a {type(tensor).__name__}"
        raise TypeError(f"{name} takes a tensor on the device, not {found}")
    return tensor
