"""``torch_xla.distributed.spmd.api``: torch's ``distribute_tensor`` and ``distribute_module`` on a mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from lazytpu import spmd
from lazytpu.compat import names
from lazytpu.spmd.mesh import as_mesh
from lazytpu.tensors.tensor import LazyTensor

__getattr__ = names.missing_from(__name__)


def xla_distribute_tensor(
    tensor: torch.Tensor, device_mesh: object, placements: Sequence[object] | None = None
) -> torch.Tensor:
    """Return a tensor on the device, split as the placements of ``torch.distributed.tensor`` say.

    Args:
        placements: one an axis of the mesh: ``Shard(dim)`` or ``Replicate()``.

    Raises:
        NotImplementedError: a placement is neither.
    """
    mesh = as_mesh(getattr(device_mesh, "mesh", device_mesh) if hasattr(device_mesh, "mesh_shape") else device_mesh)
    axes: list[tuple[str, ...]] = [()] * tensor.dim()
    for name, placement in zip(mesh.axis_names, placements or (), strict=False):
        dimension = getattr(placement, "dim", None)
        if dimension is not None:
            axes[dimension] = (*axes[dimension], name)
        elif type(placement).__name__ != "Replicate":
            raise NotImplementedError(f"xla_distribute_tensor takes Shard and Replicate, not {placement}")
    return spmd.mark_sharding(tensor.to(LazyTensor.device_type), mesh, axes)


def xla_distribute_module(
    module: nn.Module,
    device_mesh: object = None,
    partition_fn: Callable[[str, nn.Module, object], None] | None = None,
    input_fn: Callable[..., object] | None = None,
    output_fn: Callable[..., object] | None = None,
) -> nn.Module:
    """Call ``partition_fn(name, submodule, mesh)`` for each submodule, and hook ``input_fn`` and ``output_fn``."""
    module.to(LazyTensor.device_type)
    if partition_fn is not None:
        for name, inner in module.named_modules():
            partition_fn(name, inner, device_mesh)
    if input_fn is not None:
        module.register_forward_pre_hook(lambda _, inputs: input_fn(inputs, device_mesh))
    if output_fn is not None:
        module.register_forward_hook(lambda _, inputs, outputs: output_fn(outputs, device_mesh))
    return module


__all__ = ["xla_distribute_module", "xla_distribute_tensor"]
