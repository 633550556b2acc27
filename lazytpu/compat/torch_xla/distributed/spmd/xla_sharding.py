"""``torch_xla.distributed.spmd.xla_sharding``: meshes and shardings under their names there.

A mesh is one of `lazytpu.spmd` whose axes may go by number, too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray

from lazytpu import spmd
from lazytpu.compat import names
from lazytpu.compat.torch_xla.distributed.spmd.xla_sharded_tensor import ShardingType, XLAShard, XLAShardedTensor
from lazytpu.runtime import meshes
from lazytpu.tracing.record import is_device_tensor

__getattr__ = names.missing_from(__name__)

Axis = int | str
PartitionSpec = Sequence[tuple[Axis, ...] | Axis | None]


class Mesh:
    """Devices in a grid.

    Args:
        device_ids: in row-major order.
        mesh_shape: length of each axis.
        axis_names: a name for each; without, axes go by number.

    Raises:
        AssertionError: shape, names and devices do not fit each other.
    """

    def __init__(
        self,
        device_ids: NDArray[np.integer] | Sequence[int],
        mesh_shape: tuple[int, ...],
        axis_names: tuple[str, ...] | None = None,
    ) -> None:
        self.device_ids = np.asarray(device_ids)
        self.mesh_shape, self.axis_names = mesh_shape, axis_names
        assert axis_names is None or len(mesh_shape) == len(axis_names) == len(set(axis_names))
        assert len(self.device_ids) == prod(mesh_shape) == len(np.unique(self.device_ids))
        assert all(d < self.size() for d in self.device_ids)
        self.mesh = spmd.Mesh(mesh_shape, self._names(), self.device_ids)

    def _names(self) -> tuple[str, ...]:
        return tuple([f"axis{i}" for i in range(len(self.mesh_shape))]) if self.axis_names is None else self.axis_names

    def size(self) -> int:
        """Return the number of devices."""
        return prod(self.mesh_shape)

    def shape(self) -> OrderedDict[Axis, int]:
        """Return the lengths of the axes by name, or by number where they have none."""
        keys: Sequence[Axis] = range(len(self.mesh_shape)) if self.axis_names is None else self.axis_names
        return OrderedDict(zip(keys, self.mesh_shape, strict=True))

    def get_logical_mesh(self) -> NDArray[np.integer]:
        """Return the devices in their grid."""
        return self.device_ids.reshape(self.mesh_shape)

    def get_axis_name_idx(self, name: str) -> int | None:
        """Return the number of an axis."""
        return self.axis_names.index(name) if self.axis_names and name in self.axis_names else None

    def spec_of(self, partition_spec: PartitionSpec) -> tuple[tuple[str, ...], ...]:
        """Return for each dimension the names of the axes.

        Raises:
            ValueError: an axis has a name that the mesh has not.
            AssertionError: an axis has a number that the mesh has not, or stands there twice.
        """
        known, found = self._names(), []
        for entry in partition_spec:
            axes = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
            for axis in axes:
                if isinstance(axis, str) and axis not in known:
                    raise ValueError(f"Axis name {axis} is not defined in the given mesh")
                assert isinstance(axis, str) or 0 <= axis < len(known), (
                    f"partition_spec ({partition_spec}) contains out of bound index into mesh_shape."
                )
            found.append(tuple([axis if isinstance(axis, str) else known[axis] for axis in axes]))
        used = [name for axes in found for name in axes]
        assert len(used) == len(set(used)), (
            f"Each device mesh dimension should appear at most once in partition_spec {partition_spec}."
        )
        return tuple(found)


class HybridMesh(Mesh):
    """A mesh over processes and the devices of each.

    Raises:
        ValueError: the shapes do not fit the devices and the processes.
    """

    def __init__(
        self,
        *,
        ici_mesh_shape: tuple[int, ...],
        dcn_mesh_shape: tuple[int, ...] | None = None,
        axis_names: tuple[str, ...] | None = None,
    ) -> None:
        found = spmd.HybridMesh(ici_mesh_shape, dcn_mesh_shape, axis_names)
        self.ici_mesh_shape = ici_mesh_shape
        self.dcn_mesh_shape = (1,) * len(ici_mesh_shape) if dcn_mesh_shape is None else dcn_mesh_shape
        super().__init__(np.array(found.devices), found.shape, axis_names)


_global_mesh: list[Mesh] = []


def set_global_mesh(mesh: Mesh) -> None:
    """Keep a mesh for `get_global_mesh`."""
    _global_mesh[:] = [mesh]


def get_global_mesh() -> Mesh | None:
    """Return the mesh that `set_global_mesh` was given last."""
    return _global_mesh[0] if _global_mesh else None


def get_1d_mesh(axis_name: str | None = None) -> Mesh:
    """Return the mesh of all devices along one axis."""
    ids = meshes.devices()
    return Mesh(np.array(ids), (len(ids),), None if axis_name is None else (axis_name,))


def mark_sharding(t: torch.Tensor, mesh: Mesh, partition_spec: PartitionSpec) -> torch.Tensor:
    """Split a tensor over the devices of a mesh; return it.

    Args:
        partition_spec: one entry a dimension: None, a number or name of an axis, or a tuple of these.

    Raises:
        AssertionError: the spec has more or fewer entries than the tensor dimensions, or does not fit the mesh.
    """
    assert len(t.shape) == len(partition_spec), (
        f"Partition spec length ({len(partition_spec)}) should be equal to the input rank ({len(t.shape)})."
    )
    return spmd.mark_sharding(t, mesh.mesh, mesh.spec_of(partition_spec))


def mark_sharding_with_gradients(t: torch.Tensor, mesh: Mesh, partition_spec: PartitionSpec) -> torch.Tensor:
    """Do as `mark_sharding`, which lays the gradient out, too; torch's autograd sees an op."""
    return mark_sharding(t.clone() if t.requires_grad and not t.is_leaf else t, mesh, partition_spec)


def clear_sharding(t: torch.Tensor) -> torch.Tensor:
    """Take the sharding of a tensor away; return it."""
    return spmd.clear_sharding(t)


def wrap_if_sharded(x: object) -> object:
    """Return what was given: a tensor with a sharding is an `XLAShardedTensor` already."""
    return x


def wrap_as_sharded_tensor(t: torch.Tensor) -> torch.Tensor:
    """Return the tensor."""
    return t


unwrap_sharded_tensor = wrap_as_sharded_tensor


@dataclass
class ShardingSpec:
    """How tensors of as many dimensions as the spec has entries are split.

    Attributes:
        mesh: the devices.
        partition_spec: one entry a dimension.
        minibatch: each process has only its part of a tensor; with one process, that is all of it.
    """

    mesh: Mesh
    partition_spec: PartitionSpec
    minibatch: bool | None = False

    def __post_init__(self) -> None:
        self.mesh.spec_of(self.partition_spec)

    def can_apply(self, t: torch.Tensor) -> bool:
        """Return whether a tensor has as many dimensions."""
        return len(t.shape) == len(self.partition_spec)

    def apply(self, t: torch.Tensor) -> None:
        """Mark a tensor of the device."""
        assert is_device_tensor(t)
        mark_sharding(t, self.mesh, self.partition_spec)


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
    "Mesh",
    "ShardingSpec",
    "ShardingType",
    "XLAPatchedLinear",
    "XLAShard",
    "XLAShardedTensor",
    "apply_backward_optimization_barrier",
    "apply_xla_patch_to_nn_linear",
    "clear_sharding",
    "get_1d_mesh",
    "get_global_mesh",
    "mark_sharding",
    "mark_sharding_with_gradients",
    "set_global_mesh",
    "unwrap_sharded_tensor",
    "wrap_as_sharded_tensor",
    "wrap_if_sharded",
    "xla_patched_nn_linear_forward",
]
