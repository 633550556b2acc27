"""Meshes of torch_xla: those of `lazytpu.spmd`, whose axes may go by number, too."""

from __future__ import annotations

import ast
from collections import OrderedDict
from collections.abc import Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

from lazytpu import spmd
from lazytpu.compat.torch_xla import runtime
from lazytpu.compat.torch_xla.distributed.spmd.op_sharding import OpSharding, op_sharding_of
from lazytpu.lowering.support import shardings
from lazytpu.observe import metrics
from lazytpu.runtime import meshes
from lazytpu.spmd.mesh import hybrid_grid

Axis = int | str
PartitionSpec = Sequence[tuple[Axis, ...] | Axis | None]


def entry_of(axes: tuple[int, ...]) -> tuple[int, ...] | int | None:
    """Return the entry of a spec for a dimension that these axes split."""
    return None if not axes else axes[0] if len(axes) == 1 else axes


class Mesh:
    """Devices in a grid.

    Args:
        device_ids: in row-major order.
        mesh_shape: length of each axis.
        axis_names: a name for each; without, axes go by number.

    Raises:
        AssertionError: shape, names and devices do not fit each other, or it has not all devices.
    """

    def __init__(
        self,
        device_ids: NDArray[np.integer] | Sequence[int],
        mesh_shape: tuple[int, ...],
        axis_names: tuple[str, ...] | None = None,
    ) -> None:
        self.device_ids = np.asarray(device_ids)
        self.mesh_shape, self.axis_names = mesh_shape, axis_names
        given, every, size = len(self.device_ids), len(meshes.devices()), prod(mesh_shape)
        assert given == every, (
            f"Number of device IDs ({given}) must match the global number of devices ({every}); "
            "lazytpu.spmd.Mesh takes some of them"
        )
        if axis_names is not None:
            assert len(mesh_shape) == len(axis_names), (
                f"Number of axis names ({len(axis_names)}) must match mesh dimensions ({len(mesh_shape)})"
            )
            assert len(set(axis_names)) == len(axis_names), f"Axis names must be unique, not {axis_names}"
        assert given == size, f"Number of device IDs ({given}) must match mesh size ({size})"
        assert len(np.unique(self.device_ids)) == given, f"Device IDs must be unique, not {self.device_ids}"
        assert self.device_ids.max() < size, f"Device IDs must be less than mesh size ({size}): {self.device_ids}"
        self.mesh = spmd.Mesh(mesh_shape, self._names(), self.device_ids)
        self._specs: dict[tuple[tuple[Axis, ...] | Axis | None, ...], tuple[tuple[str, ...], ...]] = {}

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

    def get_op_sharding(self, partition_spec: PartitionSpec) -> OpSharding:
        """Return how a tensor with a spec lies."""
        return op_sharding_of(self.mesh, self.spec_of(partition_spec))

    get_op_sharding_v2 = get_op_sharding

    def get_jax_mesh(self) -> object:
        """Return the mesh of jax with the same devices; axes without a name are ``axis0``, ``axis1``, ..."""
        return shardings.mesh_of(self.mesh)

    def __str__(self) -> str:
        parts = {"device_ids": self.device_ids.tolist(), "mesh_shape": self.mesh_shape, "axis_names": self.axis_names}
        return str(parts)

    @classmethod
    def from_str(cls, mesh_str: str) -> Mesh | None:
        """Return the mesh whose text this is; None where it is not one's."""
        try:
            return cls(**ast.literal_eval(mesh_str))
        except (ValueError, SyntaxError, TypeError):
            return None

    def spec_of(self, partition_spec: PartitionSpec) -> tuple[tuple[str, ...], ...]:
        """Return for each dimension the names of the axes.

        Raises:
            ValueError: an axis has a name that the mesh has not.
            AssertionError: an axis has a number that the mesh has not, or stands there twice.
        """
        key = tuple(partition_spec)
        if key not in self._specs:
            self._specs[key] = self._names_of(key)
            metrics.count("spec")
        return self._specs[key]

    def _names_of(self, partition_spec: PartitionSpec) -> tuple[tuple[str, ...], ...]:
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
    """A mesh over as many slices of TPUs, or else over processes, and the devices of each.

    Raises:
        ValueError: the shapes do not fit the devices.
    """

    def __init__(
        self,
        *,
        ici_mesh_shape: tuple[int, ...],
        dcn_mesh_shape: tuple[int, ...] | None = None,
        axis_names: tuple[str, ...] | None = None,
    ) -> None:
        self.ici_mesh_shape = ici_mesh_shape
        self.dcn_mesh_shape = (1,) * len(ici_mesh_shape) if dcn_mesh_shape is None else dcn_mesh_shape
        slices = _slices()
        groups = slices if len(slices) == prod(self.dcn_mesh_shape) else meshes.devices_by_process()
        grid = hybrid_grid(ici_mesh_shape, self.dcn_mesh_shape, groups)
        super().__init__(grid.flatten(), grid.shape, axis_names)


def _slices() -> list[list[int]]:
    """Return the devices of each slice of TPUs in the order of their coordinates; nothing where there is none."""
    found: dict[int, list[tuple[tuple[int, ...], int]]] = {}
    for each in runtime.global_runtime_device_attributes():
        if "slice_index" in each:
            place = (*reversed(each["coords"]), each["core_on_chip"])
            found.setdefault(each["slice_index"], []).append((place, int(each["name"].rpartition(":")[2])))
    return [[number for _, number in sorted(found[index])] for index in sorted(found)]


_global_mesh: list[Mesh] = []


def set_global_mesh(mesh: Mesh | None) -> None:
    """Keep a mesh for `get_global_mesh`; None forgets the one before."""
    _global_mesh[:] = [] if mesh is None else [mesh]


def get_global_mesh() -> Mesh | None:
    """Return the mesh that `set_global_mesh` was given last."""
    return _global_mesh[0] if _global_mesh else None


def get_1d_mesh(axis_name: str | None = None) -> Mesh:
    """Return the mesh of all devices along one axis."""
    ids = meshes.devices()
    return Mesh(np.array(ids), (len(ids),), None if axis_name is None else (axis_name,))
