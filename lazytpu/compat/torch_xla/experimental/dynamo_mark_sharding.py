"""``torch.ops.xla.dynamo_mark_sharding``: `mark_sharding` as an op, whose mesh and spec are numbers and text."""

from __future__ import annotations

import ast
from collections.abc import Sequence

import torch

from lazytpu.compat.torch_xla.distributed.spmd.xla_sharding import Mesh, annotate_custom_sharding, unwrap_sharded_tensor
from lazytpu.tracing.record import is_device_tensor

_library = torch.library.Library("xla", "FRAGMENT")
_library.define(
    "dynamo_mark_sharding(Tensor input, int[] device_ids, int[] mesh_shape, str axis_names, str partition_spec)"
    " -> Tensor"
)


def dynamo_mark_sharding(
    input: torch.Tensor, device_ids: Sequence[int], mesh_shape: Sequence[int], axis_names: str, partition_spec: str
) -> torch.Tensor:
    """Split a tensor over the devices of a mesh; return it.  A tensor of another device stays as it is.

    Args:
        device_ids: of the mesh, in row-major order.
        mesh_shape: length of each axis.
        axis_names: a tuple of names, or None, as Python writes it.
        partition_spec: one entry a dimension, as Python writes it: ``"(1, 0)"``.
    """
    if not is_device_tensor(input):
        return input
    mesh = Mesh(device_ids, tuple(mesh_shape), ast.literal_eval(axis_names))
    return unwrap_sharded_tensor(annotate_custom_sharding(input, mesh, ast.literal_eval(partition_spec)))


_library.impl("dynamo_mark_sharding", dynamo_mark_sharding, "CompositeExplicitAutograd")
_library.impl("dynamo_mark_sharding", dynamo_mark_sharding, "PrivateUse1")
