"""``torch_xla.distributed.spmd.xla_sharding``: shardings under their names there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch

from lazytpu import spmd
from lazytpu.compat import names
from lazytpu.compat.torch_xla.distributed.spmd.manual import (
    _mark_manual_sharding,
    disable_manual_sharding,
    enable_manual_sharding,
)
from lazytpu.compat.torch_xla.distributed.spmd.mesh import (
    HybridMesh,
    Mesh,
    PartitionSpec,
    get_1d_mesh,
    get_global_mesh,
    set_global_mesh,
)
from lazytpu.compat.torch_xla.distributed.spmd.op_sharding import OpSharding, op_sharding_of
from lazytpu.compat.torch_xla.distributed.spmd.xla_sharded_tensor import (
    ShardingType,
    XLAShard,
    XLAShardedTensor,
    as_sharded,
    leaf_of,
    unwrapped,
)
from lazytpu.dtypes import host_array
from lazytpu.frontends.jax.arrays import from_jax
from lazytpu.ir.op_schema import Arg
from lazytpu.ir.sharding import sharding as named
from lazytpu.runtime import meshes
from lazytpu.tracing import sharding
from lazytpu.tracing.record import is_device_tensor

__getattr__ = names.missing_from(__name__)


def mark_sharding(t: torch.Tensor, mesh: Mesh, partition_spec: PartitionSpec) -> torch.Tensor:
    """Split a tensor over the devices of a mesh; return it as an `XLAShardedTensor`.

    Args:
        partition_spec: one entry a dimension: None, a number or name of an axis, or a tuple of these.

    Raises:
        AssertionError: the spec has more or fewer entries than the tensor dimensions, or does not fit the mesh.
    """
    spec = _spec_of(t, mesh, partition_spec)
    found = sharding.sharding_of(t) if is_device_tensor(t) else None
    if found is not None and not found.is_replicated:
        have, wanted = op_sharding_of(found.mesh, found.spec), op_sharding_of(mesh.mesh, spec)
        if str(have) != str(wanted):
            raise RuntimeError(f"the tensor lies as {have}: clear_sharding(t) before it can lie as {wanted}")
    spmd.mark_sharding(leaf_of(t), mesh.mesh, spec)
    return as_sharded(t)


def _spec_of(t: torch.Tensor, mesh: Mesh, partition_spec: PartitionSpec) -> tuple[tuple[str, ...], ...]:
    assert len(t.shape) == len(partition_spec), (
        f"Partition spec length ({len(partition_spec)}) should be equal to the input rank ({len(t.shape)})."
    )
    return mesh.spec_of(partition_spec)


def annotate_custom_sharding(t: torch.Tensor, mesh: Mesh, partition_spec: PartitionSpec) -> torch.Tensor:
    """Do as `mark_sharding`, also with a tensor that has another sharding."""
    spmd.mark_sharding(leaf_of(t), mesh.mesh, _spec_of(t, mesh, partition_spec))
    return as_sharded(t)


class MarkShardingFunction(torch.autograd.Function):
    """A new tensor with the contents of one, split over the devices of a mesh, as is its gradient."""

    @staticmethod
    def forward(ctx: Arg, torch_tensor: torch.Tensor, mesh: Mesh, partition_spec: PartitionSpec) -> torch.Tensor:
        """Lay a tensor out."""
        ctx.mesh, ctx.spec = mesh.mesh, _spec_of(torch_tensor, mesh, partition_spec)
        return sharding.laid_out(torch_tensor, ctx.mesh, ctx.spec)

    @staticmethod
    def backward(ctx: Arg, grad_output: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Lay its gradient out."""
        return sharding.laid_out(grad_output, ctx.mesh, ctx.spec), None, None


def mark_sharding_with_gradients(t: torch.Tensor, mesh: Mesh, partition_spec: PartitionSpec) -> torch.Tensor:
    """Return a new tensor with the contents of one, split over the devices of a mesh, as is its gradient."""
    apply: Callable[..., torch.Tensor] = MarkShardingFunction.apply
    return apply(t, mesh, partition_spec)


def shard_as(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two tensors with their contents, where one that has no sharding lies as the other does."""
    mine, other = sharding.sharding_of(a), sharding.sharding_of(b)
    found = mine or other
    if found is None:
        return a, b
    a, b = (t if has else sharding.laid_out(t, found.mesh, found.spec) for t, has in ((a, mine), (b, other)))
    return a, b


def clear_sharding(t: torch.Tensor) -> torch.Tensor:
    """Take the sharding of a tensor away; return it."""
    return spmd.clear_sharding(t)


def wrap_if_sharded(x: object) -> object:
    """Return a tensor with a sharding as an `XLAShardedTensor`, anything else as it is."""
    return as_sharded(x) if isinstance(x, torch.Tensor) and isinstance(x, XLAShardedTensor) else x


def wrap_as_sharded_tensor(
    t: torch.Tensor, mesh_shape: tuple[int, ...] | None = None, partition_spec: PartitionSpec | None = None
) -> torch.Tensor:
    """Return the tensor as an `XLAShardedTensor`, split over all devices in a grid if a shape and a spec are given."""
    if mesh_shape is None or partition_spec is None:
        return as_sharded(t)
    return annotate_custom_sharding(t, Mesh(range(prod(mesh_shape)), mesh_shape), partition_spec)


def unwrap_sharded_tensor(t: torch.Tensor) -> torch.Tensor:
    """Return the tensor that an `XLAShardedTensor` stands for."""
    return unwrapped(t)


@dataclass
class ShardingSpec:
    """How tensors of as many dimensions as the spec has entries are split.

    Attributes:
        mesh: the devices.
        partition_spec: one entry a dimension.
        minibatch: each process has only its part of a batch; `MpDeviceLoader` puts them together.
    """

    mesh: Mesh
    partition_spec: PartitionSpec
    minibatch: bool | None = False

    def __post_init__(self) -> None:
        self._names = self.mesh.spec_of(self.partition_spec)

    def can_apply(self, t: torch.Tensor) -> bool:
        """Return whether a tensor has as many dimensions."""
        return len(t.shape) == len(self.partition_spec)

    def apply(self, t: torch.Tensor) -> None:
        """Mark a tensor of the device.

        Raises:
            RuntimeError: it is only the part that this process has of a batch.
        """
        assert is_device_tensor(t)
        if self.minibatch:
            self._check_part(t)
            if meshes.over_processes(self.mesh.mesh):
                raise RuntimeError("minibatch=True: parts of several processes become one batch in MpDeviceLoader only")
        mark_sharding(t, self.mesh, self.partition_spec)

    def placed(self, t: torch.Tensor) -> torch.Tensor | None:
        """Return a batch on the device whose part this process has on the CPU; None where it has all of it.

        Raises:
            RuntimeError: the part cannot be split evenly among the devices of this process.
        """
        if not (self.minibatch and meshes.over_processes(self.mesh.mesh)):
            return None
        self._check_part(t)
        lies = named(self.mesh.mesh, self._names, t.shape)
        return from_jax(meshes.from_parts(host_array(t), lies))

    def _check_part(self, t: torch.Tensor) -> None:
        count = len(meshes.devices()) // len(meshes.devices_by_process())
        if t.shape[0] % count:
            raise RuntimeError(
                "When minibatch is configured, the per-host batch size must be divisible by local runtime device "
                f"count. Per host input data shape = {tuple(t.shape)}, local runtime device count = {count}"
            )


class XLAPatchedLinear(torch.autograd.Function):
    """``torch.nn.functional.linear``, which keeps the dimensions of its input apart here anyway."""

    @staticmethod
    def apply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.nn.functional.linear(x, weight, bias)


def xla_patched_nn_linear_forward(m: torch.nn.Linear, input: torch.Tensor) -> torch.Tensor:
    """Return ``m(input)``."""
    return torch.nn.functional.linear(input, m.weight, m.bias)


def apply_xla_patch_to_nn_linear(module: torch.nn.Module, *args: object) -> torch.nn.Module:
    """Return the module as it is: `XLAPatchedLinear` is ``linear`` here."""
    return module


def apply_backward_optimization_barrier(m: torch.nn.Module) -> None:
    """Do nothing: XLA schedules the gradients of all layers by itself."""


__all__ = [
    "HybridMesh",
    "MarkShardingFunction",
    "Mesh",
    "OpSharding",
    "ShardingSpec",
    "ShardingType",
    "XLAPatchedLinear",
    "XLAShard",
    "XLAShardedTensor",
    "_mark_manual_sharding",
    "annotate_custom_sharding",
    "apply_backward_optimization_barrier",
    "apply_xla_patch_to_nn_linear",
    "clear_sharding",
    "disable_manual_sharding",
    "enable_manual_sharding",
    "get_1d_mesh",
    "get_global_mesh",
    "mark_sharding",
    "mark_sharding_with_gradients",
    "set_global_mesh",
    "shard_as",
    "unwrap_sharded_tensor",
    "wrap_as_sharded_tensor",
    "wrap_if_sharded",
    "xla_patched_nn_linear_forward",
]
