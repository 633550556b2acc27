"""Ways to train over many devices: split the batch, the parameters, or the layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch
from torch import nn

from lazytpu.frontends.loader import DeviceLoader
from lazytpu.ir.sharding import Entry
from lazytpu.ir.sharding import Mesh as AnyMesh
from lazytpu.spmd.marking import mark_sharding, sharding_of
from lazytpu.spmd.mesh import as_mesh
from lazytpu.tensors.tensor import LazyTensor

_M = TypeVar("_M", bound=nn.Module)


def data_parallel(
    model: _M, loader: Iterable[object], mesh: AnyMesh, axis: str | None = None, prefetch: int = 2
) -> tuple[_M, DeviceLoader]:
    """Train with each batch split over the devices, each of which has the whole model.

    Losses, gradients and statistics of batch norm are those of the whole batch.

    Args:
        model: moved to the device.
        loader: of batches whose first dimension is that of the examples.
        mesh: the devices.
        axis: of the mesh, that examples are split over; the first one by default.
        prefetch: as of `lazytpu.DeviceLoader`.

    Returns:
        The model, and a `lazytpu.DeviceLoader` that puts batches on the mesh.

    Example:
        >>> mesh = lazytpu.spmd.Mesh((8,), ("data",))  # doctest: +SKIP
        >>> model, loader = lazytpu.spmd.data_parallel(model, loader, mesh)  # doctest: +SKIP
    """
    grid = as_mesh(mesh)
    spec = (axis_of(grid, axis, 0),)
    return model.to(LazyTensor.device_type), DeviceLoader(loader, prefetch=prefetch, mesh=grid, spec=spec)


def fully_shard(module: _M, mesh: AnyMesh, axis: str | None = None) -> _M:
    """Split each parameter and buffer over the devices, and with it gradient and state of the optimizer.

    A parameter is split along its largest dimension that divides and that is not split yet, so this comes after
    `parallelize` where both are wanted.  One with fewer elements along each dimension than there are devices stays
    whole.  The batch is to be split over the same axis; XLA gathers a parameter where it is used.

    Args:
        module: on the device, or moved there.
        mesh: the devices.
        axis: of the mesh, that parameters are split over; the first one by default.

    Returns:
        The module itself.

    Example:
        >>> lazytpu.spmd.fully_shard(model, mesh)  # doctest: +SKIP
    """
    grid = as_mesh(mesh)
    name = axis_of(grid, axis, 0)
    module.to(LazyTensor.device_type)
    for tensor in (*module.parameters(), *module.buffers()):
        spec = fully_sharded_spec(tensor, grid, name)
        if spec is not None:
            mark_sharding(tensor, grid, spec)
    return module


def fully_sharded_spec(tensor: torch.Tensor, mesh: AnyMesh, axis: str) -> Sequence[Entry] | None:
    """Return how `fully_shard` splits a tensor; None where it stays as it is."""
    count = mesh.axes[axis]
    found = sharding_of(tensor)
    spec = [None] * tensor.dim() if found is None else list(found.spec)
    if any(axis in (entry if isinstance(entry, tuple) else (entry,)) for entry in spec):
        return None
    free = [d for d, entry in enumerate(spec) if entry is None and tensor.shape[d] >= count]
    if not free:
        return None
    best = max(free, key=lambda d: (tensor.shape[d] % count == 0, tensor.shape[d], -d))
    return [axis if d == best else entry for d, entry in enumerate(spec)]


def axis_of(mesh: AnyMesh, axis: str | None, default: int) -> str:
    """Return the axis that was asked for.

    Raises:
        ValueError: the mesh has no such axis.
    """
    if axis is None:
        return mesh.axis_names[default]
    if axis not in mesh.axis_names:
        raise ValueError(f"the mesh has no axis {axis!r}, but {', '.join(map(repr, mesh.axis_names))}")
    return axis
