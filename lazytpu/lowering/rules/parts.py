"""What each device of a mesh computes with its own part of a tensor: ``lazytpu::to_parts`` and what may follow it.

``to_parts(x, sharding)`` is the part of a device, ``from_parts(x, sharding, size)`` the whole again.  What lies between
is lowered once, for all devices (`lazytpu.lowering.parts`).  Devices exchange parts by the other ops; ``groups`` says
which do so with which: positions of devices in their mesh, as in ``0,1|2,3``.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from lazytpu.ir.sharding import named_sharding
from lazytpu.lowering.registry import lowers

AXIS = "device"
"""Name of the axis over all devices of the mesh, while a part is lowered."""

library = torch.library.Library("lazytpu", "FRAGMENT")
library.define("to_parts(Tensor x, str sharding) -> Tensor")
library.define("from_parts(Tensor x, str sharding, int[] size) -> Tensor")
library.define("reduce_parts(Tensor x, str reduction, str groups) -> Tensor")
library.define("gather_parts(Tensor x, int dim, str groups) -> Tensor")
library.define("scatter_parts(Tensor x, int dim, str groups) -> Tensor")
library.define("exchange_parts(Tensor x, int split, int concat, str groups) -> Tensor")
library.define("permute_parts(Tensor x, int[] moves) -> Tensor")
library.define("place_of_part(Tensor x, str groups) -> Tensor")
_ops = torch.ops.lazytpu


def groups_of(text: str) -> list[list[int]]:
    """Return the groups of positions that ``0,1|2,3`` names."""
    return [[int(i) for i in group.split(",")] for group in text.split("|")]


def _resized(x: torch.Tensor, **factors: tuple[int, float]) -> torch.Tensor:
    size = list(x.shape)
    for dim, factor in factors.values():
        size[dim] = int(size[dim] * factor)
    return x.new_empty(size)


def _part(x: torch.Tensor, sharding: str) -> torch.Tensor:
    lies = named_sharding(sharding, x.dim())
    return x.new_empty([n // k for n, k in zip(lies.padded(x.shape), lies.parts, strict=True)])


def _count(groups: str) -> int:
    return len(groups_of(groups)[0])


library.impl("to_parts", _part, "Meta")
library.impl("from_parts", lambda x, sharding, size: x.new_empty(size), "Meta")
library.impl("reduce_parts", lambda x, reduction, groups: x.new_empty(x.shape), "Meta")
library.impl("permute_parts", lambda x, moves: x.new_empty(x.shape), "Meta")
library.impl("gather_parts", lambda x, dim, groups: _resized(x, a=(dim, _count(groups))), "Meta")
library.impl("scatter_parts", lambda x, dim, groups: _resized(x, a=(dim, 1 / _count(groups))), "Meta")
library.impl(
    "exchange_parts",
    lambda x, split, concat, groups: _resized(x, a=(split, 1 / _count(groups)), b=(concat, _count(groups))),
    "Meta",
)
library.impl("place_of_part", lambda x, groups: x.new_empty((), dtype=torch.int64), "Meta")

_REDUCTIONS: dict[str, Callable[..., jax.Array]] = {"sum": lax.psum, "min": lax.pmin, "max": lax.pmax}


@lowers(_ops.reduce_parts.default)
def reduce_parts(out, x, reduction, groups):
    as_number = x.astype(np.int32) if x.dtype == np.bool_ else x
    return _REDUCTIONS[reduction](as_number, AXIS, axis_index_groups=groups_of(groups)).astype(out.dtype)


@lowers(_ops.gather_parts.default)
def gather_parts(out, x, dim, groups):
    return lax.all_gather(x, AXIS, axis=dim, axis_index_groups=groups_of(groups), tiled=True)


@lowers(_ops.scatter_parts.default)
def scatter_parts(out, x, dim, groups):
    return lax.psum_scatter(x, AXIS, scatter_dimension=dim, axis_index_groups=groups_of(groups), tiled=True)


@lowers(_ops.exchange_parts.default)
def exchange_parts(out, x, split, concat, groups):
    return lax.all_to_all(x, AXIS, split, concat, axis_index_groups=groups_of(groups), tiled=True)


@lowers(_ops.permute_parts.default)
def permute_parts(out, x, moves):
    return lax.ppermute(x, AXIS, list(zip(moves[::2], moves[1::2], strict=True)))


@lowers(_ops.place_of_part.default)
def place_of_part(out, x, groups):
    places = {device: i for group in groups_of(groups) for i, device in enumerate(group)}
    table = jnp.array([places.get(device, 0) for device in range(len(places))], jnp.int64)
    return table[lax.axis_index(AXIS)]
