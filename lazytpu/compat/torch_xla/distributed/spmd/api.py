"""``torch_xla.distributed.spmd.api``: torch's ``distribute_tensor`` and ``distribute_module`` on a mesh."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from lazytpu import spmd
from lazytpu.compat import names
from lazytpu.compat.torch_xla import runtime
from lazytpu.compat.torch_xla.distributed.spmd.mesh import Mesh, entry_of
from lazytpu.compat.torch_xla.distributed.spmd.xla_sharded_tensor import XLAShardedTensor
from lazytpu.compat.torch_xla.distributed.spmd.xla_sharding import annotate_custom_sharding, mark_sharding
from lazytpu.runtime import meshes
from lazytpu.tensors.tensor import LazyTensor

__getattr__ = names.missing_from(__name__)


AnyMesh: TypeAlias = DeviceMesh | Mesh | spmd.Mesh


class Placement(Protocol):
    """What ``Shard(dim)``, ``Replicate()`` and ``Partial()`` of ``torch.distributed.tensor`` are."""

    def is_shard(self) -> bool: ...
    def is_replicate(self) -> bool: ...


def convert_to_xla_mesh(dt_mesh: AnyMesh) -> Mesh:
    """Return the mesh with the devices and the names of one of torch's, which has all devices.

    Raises:
        AssertionError: it has not.
    """
    if isinstance(dt_mesh, Mesh):
        return dt_mesh
    if isinstance(dt_mesh, spmd.Mesh):
        return Mesh(np.array(dt_mesh.devices), dt_mesh.shape, dt_mesh.axis_names)
    assert dt_mesh.size() == len(meshes.devices()), f"{dt_mesh} has not all {len(meshes.devices())} devices"
    return Mesh(dt_mesh.mesh.flatten().numpy(), tuple(dt_mesh.mesh.shape), dt_mesh.mesh_dim_names)


def convert_to_xla_partition_spec(
    tensor: torch.Tensor, placements: Sequence[Placement]
) -> tuple[tuple[int, ...] | int | None, ...]:
    """Return for each dimension the numbers of the axes that split it, as the placements say.

    Args:
        placements: one an axis of the mesh: ``Shard(dim)`` or ``Replicate()``.

    Raises:
        ValueError: a placement is neither.
        IndexError: the tensor has not that dimension.
    """
    found: list[tuple[int, ...]] = [()] * tensor.dim()
    for axis, placement in enumerate(placements):
        if placement.is_shard():
            dim: int = getattr(placement, "dim")  # noqa: B009
            if not -tensor.dim() <= dim < tensor.dim():
                raise IndexError(f"{placement} of a tensor with {tensor.dim()} dimensions")
            found[dim] = (*found[dim], axis)
        elif not placement.is_replicate():
            raise ValueError(f"a tensor lies by Shard and Replicate, not by {placement}")
    return tuple(map(entry_of, found))


def xla_distribute_tensor(
    tensor: torch.Tensor, device_mesh: AnyMesh, placements: Sequence[Placement] | None = None
) -> torch.Tensor:
    """Return a tensor on the device, split as the placements of ``torch.distributed.tensor`` say.

    Args:
        placements: one an axis of the mesh, ``Shard(dim)`` or ``Replicate()``; by default it is not split.

    Raises:
        ValueError: a placement is neither, or there are more or fewer than axes.
    """
    mesh = convert_to_xla_mesh(device_mesh)
    if placements is not None and len(placements) != len(mesh.mesh_shape):
        raise ValueError(f"{len(placements)} placements on a mesh with {len(mesh.mesh_shape)} axes")
    moved = tensor.to(LazyTensor.device_type)
    if moved is not tensor and isinstance(tensor, nn.Parameter):
        moved = nn.Parameter(moved.detach(), tensor.requires_grad)
    return mark_sharding(moved, mesh, convert_to_xla_partition_spec(moved, placements or ()))


def redistribute(
    tensor: torch.Tensor, device_mesh: AnyMesh, placements: Sequence[Placement], *, async_op: bool = False
) -> torch.Tensor:
    """Lay a tensor out as placements say, whatever sharding it has; return it, or a copy with ``async_op``.

    Raises:
        ValueError: there are more or fewer placements than axes.
        NotImplementedError: a placement is neither ``Shard`` nor ``Replicate``.
    """
    mesh = convert_to_xla_mesh(device_mesh)
    if len(placements) != len(mesh.mesh_shape):
        raise ValueError(f"{len(placements)} placements on a mesh with {len(mesh.mesh_shape)} axes")
    for placement in placements:
        if not (placement.is_shard() or placement.is_replicate()):
            raise NotImplementedError(f"redistribute takes Shard and Replicate, not {placement}")
    spec = convert_to_xla_partition_spec(tensor, placements)
    return annotate_custom_sharding(tensor.clone() if async_op else tensor, mesh, spec)


for _class in (LazyTensor, XLAShardedTensor):
    setattr(_class, "redistribute", redistribute)  # noqa: B010


def auto_policy(mod_name: str, mod: nn.Module, mesh: object) -> None:
    """As ``partition_fn`` it stands for ``use_spmd(auto=True)``; it marks nothing."""


def xla_distribute_module(
    module: nn.Module,
    device_mesh: object = None,
    partition_fn: Callable[[str, nn.Module, object], None] | None = None,
    input_fn: Callable[..., object] | None = None,
    output_fn: Callable[..., object] | None = None,
) -> nn.Module:
    """Call ``partition_fn(name, submodule, mesh)`` for each submodule, and hook ``input_fn`` and ``output_fn``.

    These get the module, what goes in or out, and the mesh; or only the last two if they have two parameters.
    """
    if partition_fn is auto_policy:
        runtime.use_spmd(auto=True)
    module.to(LazyTensor.device_type)
    if partition_fn is not None:
        for name, inner in module.named_modules():
            partition_fn(name, inner, device_mesh)
    if input_fn is not None:
        taken = _with_module(input_fn)
        module.register_forward_pre_hook(lambda mod, inputs: taken(mod, inputs, device_mesh))
    if output_fn is not None:
        given = _with_module(output_fn)
        module.register_forward_hook(lambda mod, inputs, outputs: given(mod, outputs, device_mesh))
    return module


def _with_module(function: Callable[..., object]) -> Callable[[nn.Module, object, object], object]:
    """Return a hook that takes the module, for one that may not."""
    if len(inspect.signature(function).parameters) == 2:
        return lambda _, value, mesh: function(value, mesh)
    return function
