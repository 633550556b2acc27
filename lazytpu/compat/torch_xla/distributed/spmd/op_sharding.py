"""``OpSharding``: how a tensor lies, as torch_xla writes it: which device has which tile."""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import IntEnum
from math import prod

import numpy as np
from numpy.typing import NDArray

from lazytpu import spmd
from lazytpu.ir import sharding as ir
from lazytpu.runtime import meshes


class ShardingType(IntEnum):
    """How a tensor is spread: each device has all of it, a part, or shares a part with some others."""

    REPLICATED = 0
    MAXIMAL = 1
    TUPLE = 2
    TILED = 3
    MANUAL = 4
    PARTIAL = 5
    UNKNOWN = 6


class OpSharding:
    """Which device has which tile of a tensor.

    Args:
        tile_assignment: the devices in a grid with a dimension for each of the tensor; where devices share a tile, one
            more at the end, for those that do.
        group_assignment, replication_groups: what torch_xla makes of the same; not looked at.
        sharding_type: REPLICATED, TILED or PARTIAL.

    Raises:
        NotImplementedError: it is of another type.
    """

    def __init__(
        self,
        tile_assignment: Sequence[object],
        group_assignment: Sequence[object] = (),
        replication_groups: Sequence[object] = (),
        sharding_type: int = ShardingType.REPLICATED,
    ) -> None:
        self.sharding_type = ShardingType(sharding_type)
        if self.sharding_type not in (ShardingType.REPLICATED, ShardingType.TILED, ShardingType.PARTIAL):
            raise NotImplementedError(
                f"OpSharding of type {self.sharding_type.name}; REPLICATED, TILED and PARTIAL are"
            )
        self.tiles: NDArray[np.int64] = np.array(tile_assignment, dtype=np.int64)

    @property
    def counts(self) -> tuple[int, ...]:
        """Into how many tiles each dimension is split; empty where each device has all."""
        if self.sharding_type == ShardingType.REPLICATED:
            return ()
        return self.tiles.shape[:-1] if self.sharding_type == ShardingType.PARTIAL else self.tiles.shape

    @property
    def mesh(self) -> spmd.Mesh:
        """A mesh with an axis for each dimension of the tiles."""
        if self.sharding_type == ShardingType.REPLICATED:
            return spmd.Mesh((-1,))
        return spmd.Mesh(self.tiles.shape, None, self.tiles)

    @property
    def spec(self) -> tuple[str | None, ...]:
        """How a tensor lies on that mesh."""
        return self.mesh.axis_names[: len(self.counts)]

    def place_of(self, device: int) -> tuple[int, ...]:
        """Return which tile a device has."""
        found = np.argwhere(self.tiles == device)
        return tuple([int(i) for i in found[0][: len(self.counts)]])

    def __str__(self) -> str:
        """Return ``{devices=[2,4]0,1,2,3,4,5,6,7}``."""
        if self.sharding_type == ShardingType.REPLICATED:
            return "{replicated}"
        dims, ids = (",".join(map(str, x)) for x in (self.tiles.shape, self.tiles.flat))
        shared = " last_tile_dim_replicate" if self.sharding_type == ShardingType.PARTIAL else ""
        return f"{{devices=[{dims}]{ids}{shared}}}"


def op_sharding_of(mesh: ir.Mesh, spec: Sequence[Sequence[str]]) -> OpSharding:
    """Return the sharding of a tensor on a mesh, with the axes that split each dimension."""
    used = [name for names in spec for name in names]
    counts = [prod([mesh.axes[name] for name in names]) for names in spec]
    if prod(counts) == 1:
        return OpSharding([])
    rest = [name for name in mesh.axis_names if name not in used]
    grid = np.array(mesh.devices).reshape(mesh.shape)
    tiles = grid.transpose([mesh.axis_names.index(name) for name in (*used, *rest)]).reshape(*counts, -1)
    if tiles.shape[-1] == 1:
        return OpSharding(tiles[..., 0].tolist(), sharding_type=ShardingType.TILED)
    return OpSharding(tiles.tolist(), sharding_type=ShardingType.PARTIAL)


def text_of(found: ir.Sharding) -> str:
    """Return a sharding as XLA writes it: with the devices listed, or short where CONVERT_SHLO_TO_SHARDY is set."""
    made = op_sharding_of(found.mesh, found.spec)
    if os.environ.get("CONVERT_SHLO_TO_SHARDY", "0").lower() in ("1", "true") and made.counts:
        return meshes.hlo_sharding(found)
    return str(made)
