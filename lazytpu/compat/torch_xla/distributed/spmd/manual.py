"""Manual sharding of torch_xla: between two calls each device computes with its own part of a tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lazytpu.compat.torch_xla.distributed.spmd.mesh import Mesh, PartitionSpec, get_1d_mesh, get_global_mesh
from lazytpu.compat.torch_xla.distributed.spmd.op_sharding import OpSharding
from lazytpu.ir import sharding as ir
from lazytpu.spmd import parts as own
from lazytpu.tracing import parts
from lazytpu.tracing.sharding import is_result, sharding_of


def enable_manual_sharding(t: torch.Tensor, partition_spec: PartitionSpec, *, mesh: Mesh | None = None) -> torch.Tensor:
    """Return what each device has of a tensor; what is computed from it is each device's own, too.

    Args:
        partition_spec: how the tensor lies.
        mesh: by default the one that `set_global_mesh` was given.

    Raises:
        ValueError: there is no mesh.
        AssertionError: the spec does not fit the tensor or the mesh.
    """
    grid = _mesh(mesh)
    return own.ToParts.of(t, ir.sharding(grid.mesh, _spec(t, grid, partition_spec), t.shape))


def disable_manual_sharding(
    t: torch.Tensor, partition_spec: PartitionSpec, full_shape: torch.Size, *, mesh: Mesh | None = None
) -> torch.Tensor:
    """Return the tensor of a shape of which each device has computed its part.

    Raises:
        RuntimeError: the tensor does not come from `enable_manual_sharding`.
        ValueError: a tensor of that shape has other parts, or there is no mesh.
        AssertionError: the spec does not fit.
    """
    grid = _mesh(mesh)
    return own.whole(_part(t), grid.mesh, _spec(t, grid, partition_spec), full_shape)


def _mark_manual_sharding(t: torch.Tensor) -> torch.Tensor:
    """Return a tensor that each device has its own of: as it is, or all of a result that has no sharding.

    Raises:
        RuntimeError: it has a sharding, or is no result of this step.
    """
    if parts.is_part(t) or not is_result(t) or sharding_of(t) is not None:
        return _part(t)
    grid = (get_global_mesh() or get_1d_mesh()).mesh
    return own.ToParts.of(t, ir.sharding(grid, (), t.shape))


def _part(t: torch.Tensor) -> torch.Tensor:
    if not parts.is_part(t):
        raise RuntimeError("the tensor is whole on each device: enable_manual_sharding gives each its part")
    return t


def full_to_shard_shape(t: torch.Tensor) -> torch.Tensor:
    """Return what each device has of a tensor with a sharding.

    Raises:
        RuntimeError: it has none.
    """
    found = sharding_of(t)
    if found is None:
        raise RuntimeError("the tensor has no sharding: mark_sharding gives it one")
    return own.ToParts.of(t, found)


def shard_to_full_shape(
    t: torch.Tensor, sharding: OpSharding, output_shape: Sequence[int], output_dtype: torch.dtype
) -> torch.Tensor:
    """Return the tensor of a shape of which each device has its part, as a sharding says."""
    return own.whole(_part(t), sharding.mesh, sharding.spec, output_shape).to(output_dtype)


def _mesh(mesh: Mesh | None) -> Mesh:
    found = get_global_mesh() if mesh is None else mesh
    if found is None:
        raise ValueError("manual sharding needs mesh=, or set_global_mesh(mesh) before")
    return found


def _spec(t: torch.Tensor, mesh: Mesh, partition_spec: PartitionSpec) -> tuple[tuple[str, ...], ...]:
    assert t.dim() == len(partition_spec), (
        f"Partition spec length ({len(partition_spec)}) should be equal to the input rank ({t.dim()})."
    )
    return mesh.spec_of(partition_spec)
