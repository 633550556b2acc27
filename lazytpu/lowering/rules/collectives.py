"""What processes exchange: ``lazytpu::all_reduce`` and the like; `lazytpu.ir.rank_patterns` explains ``ranks``.

Every process of a group records the same op with its own operand.  Operands have a dimension to split where they are
split or joined: dimension 0.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from lazytpu.lowering.registry import lowers
from lazytpu.lowering.support.processes import AXIS, axis_groups, index_in_group, pairs, size_of

_library = torch.library.Library("lazytpu", "FRAGMENT")
_library.define("all_reduce(Tensor x, str reduction, float? factor, str ranks) -> Tensor")
_library.define("all_gather(Tensor x, str ranks) -> Tensor")
_library.define("reduce_scatter(Tensor x, str reduction, float? factor, str ranks) -> Tensor")
_library.define("all_to_all(Tensor x, str ranks) -> Tensor")
_library.define("broadcast(Tensor x, int source, str ranks) -> Tensor")
_library.define("scatter(Tensor x, int source, str ranks) -> Tensor")
_library.define("permute(Tensor x, int[] moves, str ranks) -> Tensor")
_ops = torch.ops.lazytpu


def _like(x: torch.Tensor, *others: object) -> torch.Tensor:
    return x.new_empty(x.shape)


for _name in ("all_reduce", "all_to_all", "broadcast", "permute"):
    _library.impl(_name, _like, "Meta")
_library.impl("all_gather", lambda x, ranks: x.new_empty((x.shape[0] * size_of(ranks), *x.shape[1:])), "Meta")
_library.impl("scatter", lambda x, source, ranks: x.new_empty((x.shape[0] // size_of(ranks), *x.shape[1:])), "Meta")
_library.impl(
    "reduce_scatter",
    lambda x, reduction, factor, ranks: x.new_empty((x.shape[0] // size_of(ranks), *x.shape[1:])),
    "Meta",
)

_BETWEEN: dict[str, Callable[..., jax.Array]] = {"sum": lax.psum, "avg": lax.psum, "min": lax.pmin, "max": lax.pmax}
_BY_ELEMENT: dict[str, Callable[..., jax.Array]] = {
    "product": lambda x: jnp.prod(x, 0, dtype=x.dtype),
    "band": lambda x: lax.reduce(x, np.array(-1).astype(x.dtype), lax.bitwise_and, (0,)),
    "bor": lambda x: lax.reduce(x, np.array(0, x.dtype), lax.bitwise_or, (0,)),
    "bxor": lambda x: lax.reduce(x, np.array(0, x.dtype), lax.bitwise_xor, (0,)),
}


@lowers(_ops.all_reduce.default)
def all_reduce(out, x, reduction, factor, ranks):
    if x.size == 0:
        return x
    groups = axis_groups(ranks)
    return _after(_before(x, factor), reduction, ranks, lambda y, between: between(y, AXIS, axis_index_groups=groups))


@lowers(_ops.reduce_scatter.default)
def reduce_scatter(out, x, reduction, factor, ranks):
    if x.size == 0:
        return jnp.zeros(out.shape, out.dtype)

    def exchange(y, between):
        if between is lax.psum:
            return lax.psum_scatter(y, AXIS, scatter_dimension=0, axis_index_groups=axis_groups(ranks), tiled=True)
        parts = lax.all_to_all(y, AXIS, 0, 0, axis_index_groups=axis_groups(ranks), tiled=True)
        parts = parts.reshape(size_of(ranks), *out.shape)
        return (jnp.min if between is lax.pmin else jnp.max)(parts, 0)

    if reduction in _BY_ELEMENT:
        parts = lax.all_to_all(x, AXIS, 0, 0, axis_index_groups=axis_groups(ranks), tiled=True)
        return _reduced(parts.reshape(size_of(ranks), *out.shape), reduction)
    return _after(_before(x, factor), reduction, ranks, exchange)


def _before(x, factor):
    return x if factor is None else (x * factor).astype(x.dtype)


def _after(x, reduction, ranks, exchange):
    """Reduce between processes, booleans as bytes."""
    if reduction in _BY_ELEMENT:
        return _reduced(lax.all_gather(x, AXIS, axis_index_groups=axis_groups(ranks)), reduction)
    if x.dtype == np.bool_:
        found = exchange(x.astype(np.int32), lax.pmin if reduction == "min" else lax.pmax)
        return found != 0
    found = exchange(x, _BETWEEN[reduction])
    if reduction != "avg":
        return found
    n = size_of(ranks)
    return (found / n).astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else lax.div(found, x.dtype.type(n))


def _reduced(parts, reduction):
    if parts.dtype == np.bool_ and reduction == "product":
        return jnp.all(parts, 0)
    return _BY_ELEMENT[reduction](parts)


@lowers(_ops.all_gather.default)
def all_gather(out, x, ranks):
    if x.size == 0:
        return jnp.zeros(out.shape, out.dtype)
    return lax.all_gather(x, AXIS, axis_index_groups=axis_groups(ranks), tiled=True)


@lowers(_ops.all_to_all.default)
def all_to_all(out, x, ranks):
    if x.size == 0:
        return x
    return lax.all_to_all(x, AXIS, 0, 0, axis_index_groups=axis_groups(ranks), tiled=True)


@lowers(_ops.broadcast.default)
def broadcast(out, x, source, ranks):
    if x.size == 0:
        return x
    bits, back = _bits(x)
    return back(lax.psum(_of_source(bits, source, ranks), AXIS, axis_index_groups=axis_groups(ranks)))


@lowers(_ops.scatter.default)
def scatter(out, x, source, ranks):
    if x.size == 0:
        return jnp.zeros(out.shape, out.dtype)
    bits, back = _bits(x)
    groups = axis_groups(ranks)
    given = _of_source(bits, source, ranks)
    return back(lax.psum_scatter(given, AXIS, scatter_dimension=0, axis_index_groups=groups, tiled=True))


@lowers(_ops.permute.default)
def permute(out, x, moves, ranks):
    return lax.ppermute(x, AXIS, pairs(ranks, moves))


def _of_source(bits, source, ranks):
    """Return the operand on one process of each group, zeros on the others: their sum is that operand, to the bit."""
    return jnp.where(index_in_group(ranks) == source, bits, jnp.zeros_like(bits))


def _bits(x):
    """Return an array as whole numbers of the same size, and what makes such numbers an array like it again."""
    if x.dtype == np.bool_:
        return x.astype(np.uint8), lambda y: y != 0
    if jnp.issubdtype(x.dtype, jnp.integer):
        return x, lambda y: y
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        parts = jnp.stack([lax.real(x), lax.imag(x)], -1)
        bits, back = _bits(parts)
        return bits, lambda y: lax.complex(*[back(y)[..., i] for i in (0, 1)])
    kind = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[x.dtype.itemsize]
    return lax.bitcast_convert_type(x, kind), lambda y: lax.bitcast_convert_type(y, x.dtype)
