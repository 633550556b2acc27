"""Meshes: the devices of all processes in a grid whose axes have names."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

from lazytpu.ir import sharding as ir
from lazytpu.runtime import meshes, world


def use() -> None:
    """Choose the global view without marking a tensor, which chooses it as well.

    A process that torchrun or `lazytpu.launch` has started joins the others, and what it records is part of one
    program over the devices of all.  ``torch_xla.runtime.use_spmd`` calls this.

    Example:
        >>> lazytpu.spmd.use()  # doctest: +SKIP
    """
    if world.awaited:
        world.connect()
    meshes.used[:] = [True]


class Mesh(ir.Mesh):
    """Devices in a grid whose axes have names.

    Args:
        shape: length of each axis; one may be -1, for what is left of the devices.
        axis_names: a name for each; ``axis0``, ``axis1``, ... by default.
        devices: ids of the devices in row-major order, flat or as an array; by default all devices of all processes.

    Attributes:
        shape, axis_names, devices: as given.

    Raises:
        ValueError: shape, names and devices do not fit each other, or a device does not exist.

    Example:
        >>> mesh = lazytpu.spmd.Mesh((2, 4), ("data", "model"))  # doctest: +SKIP
    """

    def __init__(
        self,
        shape: Sequence[int],
        axis_names: Sequence[str] | None = None,
        devices: Sequence[int] | NDArray[np.integer] | None = None,
    ) -> None:
        sizes = tuple([int(n) for n in shape])
        names = tuple([f"axis{i}" for i in range(len(sizes))]) if axis_names is None else tuple(axis_names)
        every = meshes.devices()
        ids = every if devices is None else tuple([int(i) for i in np.asarray(devices).flat])
        known = prod([n for n in sizes if n != -1])
        if sizes.count(-1) == 1 and known > 0 and len(ids) % known == 0:
            sizes = tuple([len(ids) // known if n == -1 else n for n in sizes])
        if len(names) != len(sizes) or len(set(names)) != len(names):
            raise ValueError(f"a mesh of shape {sizes} needs {len(sizes)} different names of axes, not {names}")
        if prod(sizes) != len(ids) or min(sizes, default=1) < 1:
            raise ValueError(f"a mesh of shape {sizes} has {prod(sizes)} devices, not {len(ids)}")
        if len(set(ids)) != len(ids) or not set(ids) <= set(every):
            raise ValueError(f"a mesh takes each device once, of {_listed(every)}, not {_listed(ids)}")
        super().__init__(sizes, names, ids)

    @property
    def size(self) -> int:
        """How many devices it has."""
        return len(self.devices)

    def __repr__(self) -> str:
        return f"Mesh{self.describe()}"


class HybridMesh(Mesh):
    """A mesh whose outer part goes over hosts (processes) and whose inner part over the devices of each.

    Args:
        ici_mesh_shape: along each axis, over the devices that a fast network connects: those of one process.
        dcn_mesh_shape: along each axis, over processes; ones by default.
        axis_names: a name for each axis.

    Raises:
        ValueError: the shapes do not fit each other or the devices of the processes.

    Example:
        >>> # 2 processes of 4 devices: data over processes, model inside each
        >>> mesh = lazytpu.spmd.HybridMesh((1, 4), (2, 1), ("data", "model"))  # doctest: +SKIP
    """

    def __init__(
        self,
        ici_mesh_shape: Sequence[int],
        dcn_mesh_shape: Sequence[int] | None = None,
        axis_names: Sequence[str] | None = None,
    ) -> None:
        inner = tuple(ici_mesh_shape)
        outer = (1,) * len(inner) if dcn_mesh_shape is None else tuple(dcn_mesh_shape)
        grid = hybrid_grid(inner, outer, meshes.devices_by_process())
        super().__init__(grid.shape, axis_names, grid)


def hybrid_grid(inner: tuple[int, ...], outer: tuple[int, ...], groups: list[list[int]]) -> NDArray[np.integer]:
    """Return devices in the grid of a hybrid mesh.

    Args:
        inner, outer: how long each axis is, over the devices of a group and over groups.
        groups: the devices that a fast network connects.

    Raises:
        ValueError: they do not fit.
    """
    if len(inner) != len(outer):
        raise ValueError(f"the two parts of a hybrid mesh have as many axes: {inner} and {outer} have not")
    if prod(outer) not in (1, len(groups)) or any(len(g) * len(groups) != prod(inner) * prod(outer) for g in groups):
        raise ValueError(
            f"a hybrid mesh of {outer} processes with {inner} devices each does not fit "
            f"{len(groups)} processes with {[len(g) for g in groups]} devices"
        )
    order = [axis for i in range(len(inner)) for axis in (i, i + len(inner))]
    shape = tuple([m * n for m, n in zip(outer, inner, strict=True)])
    return np.array(groups).reshape(*outer, *inner).transpose(order).reshape(shape)


def as_mesh(mesh: object) -> ir.Mesh:
    """Return a mesh of ours for one of ours or a ``torch.distributed.DeviceMesh``.

    Raises:
        TypeError: it is neither.
    """
    if isinstance(mesh, ir.Mesh):
        return mesh
    ids, names = getattr(mesh, "mesh", None), getattr(mesh, "mesh_dim_names", ())
    if ids is None or not hasattr(ids, "shape"):
        raise TypeError(f"a mesh is a lazytpu.spmd.Mesh or a torch DeviceMesh, not a {type(mesh).__name__}")
    return Mesh(tuple(ids.shape), names or None, ids.cpu().numpy())


def _listed(ids: Sequence[int]) -> str:
    return ", ".join(map(str, ids))
