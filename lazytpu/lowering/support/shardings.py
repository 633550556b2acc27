"""Shardings as jax has them."""

from __future__ import annotations

from functools import cache

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from lazytpu.ir.sharding import Mesh, Sharding, interned
from lazytpu.lowering import target


def mesh_of(mesh: Mesh) -> jax.sharding.Mesh:
    """Return jax's mesh over the same devices, those of a described topology where programs are for one.

    Raises:
        ValueError: there is no device of one of the ids.
    """
    return _mesh_of(mesh, target.described())


@cache
def _mesh_of(mesh: Mesh, topology: target.Topology | None) -> jax.sharding.Mesh:
    known = {device.id: device for device in target.devices()}
    missing = [i for i in mesh.devices if i not in known]
    if missing:
        raise ValueError(f"{mesh}: there is no device {missing[0]}, but {len(known)} devices: {sorted(known)}")
    devices = np.array([known[i] for i in mesh.devices]).reshape(mesh.shape)
    return jax.sharding.Mesh(devices, mesh.axis_names)


def named(sharding: Sharding) -> NamedSharding:
    """Return jax's sharding of the same mesh and spec."""
    return _named(sharding, target.described())


@cache
def _named(sharding: Sharding, topology: target.Topology | None) -> NamedSharding:
    if sharding.own:
        return NamedSharding(mesh_of(sharding.mesh), PartitionSpec(sharding.mesh.axis_names))
    if sharding.is_replicated:
        return _replicated(sharding.mesh, topology)  # one object, so that `is` finds most that are replicated
    entries = [PartitionSpec.UNCONSTRAINED if entry is ... else entry for entry in sharding.entries()]
    return NamedSharding(mesh_of(sharding.mesh), PartitionSpec(*entries))


def replicated(mesh: Mesh) -> NamedSharding:
    """Return the sharding of an array that all devices of a mesh have all of."""
    return _replicated(mesh, target.described())


@cache
def _replicated(mesh: Mesh, topology: target.Topology | None) -> NamedSharding:
    return whole(mesh_of(mesh))


@cache
def known(sharding: NamedSharding, ndim: int, mesh: Mesh | None) -> Sharding:
    """Return what jax's sharding of an array of ``ndim`` dimensions is here, on ``mesh`` if that is equal."""
    found = sharding.mesh
    grid = Mesh(
        tuple(found.devices.shape), tuple(map(str, found.axis_names)), tuple([d.id for d in found.devices.flat])
    )
    spec = [() if e is None else e if isinstance(e, tuple) else (e,) for e in sharding.spec]
    full = tuple([tuple(map(str, names)) for names in spec] + [()] * (ndim - len(spec)))
    return interned(grid if mesh is None or mesh != grid else mesh, full)


def padded(x: jax.Array, sharding: Sharding) -> jax.Array:
    """Return an array with zeros at the ends of dimensions that cannot be split evenly."""
    if sharding.own:
        return x
    size = sharding.padded(x.shape)
    return (
        x
        if size == x.shape
        else lax.pad(x, x.dtype.type(0), [(0, m - n, 0) for n, m in zip(x.shape, size, strict=True)])
    )


def cropped(x: jax.Array, size: tuple[int, ...]) -> jax.Array:
    """Return an array without what `padded` has added."""
    return x if x.shape == size else lax.slice(x, [0] * x.ndim, size)


def constrained(x: jax.Array, sharding: Sharding) -> jax.Array:
    """Return an array that XLA lays out as the sharding says."""
    return cropped(lax.with_sharding_constraint(padded(x, sharding), named(sharding)), x.shape)


def written(sharding: NamedSharding) -> list[object]:
    """Return a sharding as JSON can hold it: of its mesh the shape, axis names and devices, and the spec."""
    mesh = sharding.mesh
    ids = [device.id for device in mesh.devices.flat]
    return [
        [*mesh.devices.shape],
        [*map(str, mesh.axis_names)],
        ids,
        [[e] if isinstance(e, str) else e for e in sharding.spec],
    ]


def read(facts: tuple[list[int], list[str], list[int], list[list[str] | None]]) -> NamedSharding:
    """Return the sharding that `written` wrote."""
    shape, names, devices, spec = facts
    mesh = mesh_of(Mesh(tuple(shape), tuple(names), tuple(devices)))
    return NamedSharding(mesh, PartitionSpec(*[None if e is None else tuple(e) for e in spec]))


def whole(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> NamedSharding:
    """Return the sharding of an array that all devices of jax's mesh have all of."""
    return NamedSharding(mesh, PartitionSpec())
