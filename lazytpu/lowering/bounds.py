"""Which indices an op reads or writes at, their range, and values that eager refuses: ``lazytpu.config.check_bounds``.

XLA does not raise for an index that is out of range, for an integer divided by zero, or for a probability of 2.  With
the check on, a graph has one more result: for every tensor of indices, divisors or such values a row ``(node or -1,
first bad index, dimension, size)``, i64[n,4].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import torch
from jax import lax

from lazytpu.ir.op_schema import Arg
from lazytpu.lowering.registry import Kwargs
from lazytpu.lowering.support.operands import Operand, cast, is_floating, is_integral, result_dtype

aten = torch.ops.aten
DIVISOR = -1  # in place of the dimension: it is no index but a divisor, which must not be 0
VALUE = -2  # in place of the dimension: it is no index but a value, and the size says why it is refused: see `REASONS`


class Indices(NamedTuple):
    """A tensor of indices into a dimension.

    Attributes:
        at: the indices, integers of any shape.
        size: of the dimension; indices from ``lowest`` to ``size - 1`` are in range.
        dim: the dimension, for the message, or `DIVISOR`.
        lowest: 0, or ``-size`` where torch counts negative indices from the end.
        ignored: an index that is allowed whatever it is.
    """

    at: jax.Array
    size: int
    dim: int = 0
    lowest: int = 0
    ignored: int | None = None


class Refused(NamedTuple):
    """Values that eager refuses.

    Attributes:
        bad: whether a value is refused, of any shape.
        reason: the number of eager's words in `REASONS`.
    """

    bad: jax.Array
    reason: int


REASONS = (
    "probability tensor contains either `inf`, `nan` or element < 0",
    "invalid multinomial distribution (sum of probabilities <= 0)",
    "Expected p_in >= 0 && p_in <= 1 to be true, but got false",
    "normal expects all elements of std >= 0.0",
    "invalid Poisson rate, expected rate to be non-negative",
    "all elements of input should be between 0 and 1",
    "all elements of target should be between 0 and 1",
    "offsets[0] has to be 0, i.e., the first sequence in the mini-batch has to start from position 0",
    "Expected i < index_size to be true, but got false",
    "torch.histc: range is not finite",
)


def _at(x: jax.Array, dim: int) -> tuple[int, int]:
    """Return the size and number of a dimension; a 0-dim tensor has one element."""
    return (x.shape[dim], dim % x.ndim) if x.ndim else (1, 0)


def _list(x: jax.Array, indices: Sequence[jax.Array | None], *_: object, **__: object) -> Iterable[Indices]:
    """Yield the indices of ``x[i, :, j]``; a mask takes as many dimensions as it has, of its own sizes."""
    dim = 0
    for i in indices:
        if i is not None and i.dtype in (jnp.bool_, jnp.uint8):
            dim += i.ndim
            continue
        if i is not None:
            yield Indices(i, x.shape[dim], dim, -x.shape[dim])
        dim += 1


def _along(x: jax.Array, dim: int, index: jax.Array, *_: object, **__: object) -> Iterable[Indices]:
    yield Indices(index, *_at(x, dim))


def _along_from_either_end(x: jax.Array, dim: int, index: jax.Array, *_: object, **__: object) -> Iterable[Indices]:
    size, dim = _at(x, dim)
    yield Indices(index, size, dim, -size)


def _flat(x: jax.Array, index: jax.Array, *_: object, **__: object) -> Iterable[Indices]:
    yield Indices(index, x.size, 0, -x.size)


def _rows(weight: jax.Array, indices: jax.Array, *_: object, **__: object) -> Iterable[Indices]:
    yield Indices(indices, weight.shape[0])


def _bags(
    weight: jax.Array, indices: jax.Array, offsets: jax.Array, scale_by_freq: bool = False, mode: int = 0, *_: object
) -> Iterable[Indices | Refused]:
    yield Indices(indices, weight.shape[0])
    yield Indices(offsets, indices.size + 1)
    yield Refused(offsets[:1] != 0, 7)
    if mode != 2:  # eager's maximum takes bags in any order
        yield Refused(offsets[1:] < offsets[:-1], 8)


def _pivots(factor: jax.Array, pivots: jax.Array, *_: object, **__: object) -> Iterable[Indices]:
    yield Indices(pivots, factor.shape[-2] + 1, factor.ndim - 2, 1)


def _sorter(sequence: jax.Array, *_: object, sorter: jax.Array | None = None, **__: object) -> Iterable[Indices]:
    if sorter is not None:
        yield Indices(sorter, *_at(sequence, -1))


def _classes(
    x: jax.Array, target: jax.Array, weight: jax.Array, reduction: int, ignore_index: int
) -> Iterable[Indices]:
    dim = 1 if x.ndim > 1 else 0
    yield Indices(target, x.shape[dim], dim, 0, ignore_index)


def _margin_class(x: jax.Array, target: jax.Array, *_: object, **__: object) -> Iterable[Indices]:
    dim = max(x.ndim - 1, 0)
    yield Indices(target, x.shape[dim] if x.ndim else 1, dim)


def _margin_classes(x: jax.Array, target: jax.Array, *_: object, **__: object) -> Iterable[Indices]:
    for found in _margin_class(x, target):
        yield found._replace(lowest=-1)  # -1 ends a list of classes


def _plane(x: jax.Array, indices: jax.Array, output_size: Sequence[int], *_: object, **__: object) -> Iterable[Indices]:
    yield Indices(indices, math.prod(output_size), x.ndim - len(output_size))


def _source(x: jax.Array, mask: jax.Array, source: jax.Array) -> Iterable[Indices]:
    shape = jnp.broadcast_shapes(x.shape, mask.shape)
    yield Indices(jnp.sum(jnp.broadcast_to(mask, shape), dtype=jnp.int64) - 1, source.size, 0, -1)


def _divisors(
    x: Operand, y: Operand, *_: object, rounding_mode: str | None = "floor", **__: object
) -> Iterable[Indices]:
    dtype = result_dtype(x, y)
    if rounding_mode is not None and is_integral(dtype):
        yield Indices(cast(y, dtype), 0, DIVISOR)


def _outside_unit(x: Operand) -> jax.Array:
    return ~((jnp.asarray(x) >= 0) & (jnp.asarray(x) <= 1))


def _weights(weights: jax.Array, *_: object, **__: object) -> Iterable[Refused]:
    yield Refused(~((weights >= 0) & jnp.isfinite(weights)), 0)
    yield Refused(~(jnp.sum(weights, axis=-1, dtype=jnp.float64) > 0), 1)


def _chances(*given: Operand, **__: object) -> Iterable[Refused]:
    yield Refused(_outside_unit(given[-1]), 2)


def _deviations(mean: Operand, std: Operand, *_: object, **__: object) -> Iterable[Refused]:
    yield Refused(~(jnp.asarray(std) >= 0), 3)


def _rates(rate: jax.Array, *_: object, **__: object) -> Iterable[Refused]:
    yield Refused(~(rate >= 0), 4)


def _chance_and_target(x: jax.Array, target: jax.Array, *_: object) -> Iterable[Refused]:
    yield Refused(_outside_unit(x), 5)
    yield Refused(_outside_unit(target), 6)


def _range_of_all(x: jax.Array, bins: int = 100, min: float = 0, max: float = 0) -> Iterable[Refused]:
    if is_floating(x.dtype):
        yield Refused((jnp.asarray(min) == jnp.asarray(max)) & ~jnp.isfinite(x), 9)


_CHECKED: dict[torch._ops.OpOverload, Callable[..., Iterable[Indices | Refused]]] = {
    **dict.fromkeys((aten.index.Tensor, aten.index_put.default, aten._index_put_impl.default), _list),
    **dict.fromkeys((aten.gather.default, aten.index_select.default, aten.index_add.default), _along),
    **dict.fromkeys((aten.scatter.src, aten.scatter.value, aten.scatter.reduce, aten.scatter.value_reduce), _along),
    **dict.fromkeys((aten.scatter_add.default, aten.scatter_reduce.two), _along),
    **dict.fromkeys((aten.index_copy.default, aten.index_reduce.default), _along),
    **dict.fromkeys((aten.index_fill.int_Scalar, aten.index_fill.int_Tensor), _along_from_either_end),
    **dict.fromkeys((aten.take.default, aten.put.default), _flat),
    **dict.fromkeys((aten.embedding.default, aten.embedding_renorm.default), _rows),
    **dict.fromkeys((aten._embedding_bag.default, aten._embedding_bag_forward_only.default), _bags),
    **dict.fromkeys((aten.lu_unpack.default, aten.linalg_lu_solve.default), _pivots),
    **dict.fromkeys((aten.searchsorted.Tensor, aten.searchsorted.Scalar), _sorter),
    **dict.fromkeys((aten.nll_loss_forward.default, aten.nll_loss2d_forward.default), _classes),
    aten.multi_margin_loss.default: _margin_class,
    aten.multilabel_margin_loss_forward.default: _margin_classes,
    **dict.fromkeys((aten.max_unpool2d.default, aten.max_unpool3d.default), _plane),
    aten.masked_scatter.default: _source,
    **dict.fromkeys(
        (aten.floor_divide.default, aten.floor_divide.Scalar, aten.div.Tensor_mode, aten.div.Scalar_mode), _divisors
    ),
    **dict.fromkeys((aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor), _divisors),
    **dict.fromkeys((aten.fmod.Tensor, aten.fmod.Scalar), _divisors),
    aten.multinomial.default: _weights,
    **dict.fromkeys((aten.bernoulli.default, aten.bernoulli.Tensor), _chances),
    **dict.fromkeys((aten.normal.Tensor_Tensor, aten.normal.float_Tensor), _deviations),
    aten.poisson.default: _rates,
    aten.binary_cross_entropy.default: _chance_and_target,
    aten.histc.default: _range_of_all,
}


def is_checked(op: torch._ops.OpOverload) -> bool:
    """Return whether ``op`` takes indices that may be out of range, divisors that may be 0, or values it may refuse."""
    return op in _CHECKED


def report_rows(op: torch._ops.OpOverload, node: int, args: Sequence[Arg], kwargs: Kwargs) -> list[jax.Array]:
    """Return the rows of the report for one op, i64[4] each.

    Args:
        op: the overload; nothing is reported where it takes no indices.
        node: its index in the graph.
        args, kwargs: its aten arguments, jax arrays for tensors.
    """
    check = _CHECKED.get(op)
    return [_row(node, found) for found in check(*args, **kwargs) if found[0].size] if check is not None else []


def _row(node: int, found: Indices | Refused) -> jax.Array:
    if isinstance(found, Refused):
        numbers = (jnp.where(jnp.any(found.bad), node, -1), *map(jnp.int64, (0, VALUE, found.reason)))
        return jnp.stack(numbers)
    index = lax.convert_element_type(jnp.asarray(found.at).reshape(-1), jnp.int64)
    bad = index == 0 if found.dim == DIVISOR else (index < found.lowest) | (index >= found.size)
    if found.ignored is not None:
        bad &= index != found.ignored
    first = jnp.argmax(bad)
    return jnp.stack([jnp.where(bad[first], node, -1), index[first], jnp.int64(found.dim), jnp.int64(found.size)])


def report(rows: list[jax.Array]) -> jax.Array:
    """Return the report of a graph."""
    return jnp.stack(rows) if rows else jnp.zeros((0, 4), jnp.int64)
