"""Reading and writing at computed indices: index, gather, scatter, masked ops, embedding.

Negative indices count from the end where torch allows them.  An index that is out of range raises in
eager torch; here a read is clamped and a write is dropped, which is what XLA does.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import torch
from jax import lax

from lazytpu.lowering.registry import lowers
from lazytpu.lowering.rules.shape import axis_of
from lazytpu.lowering.support.operands import cast, compute_dtype

aten = torch.ops.aten

_CLIP, _DROP = lax.GatherScatterMode.CLIP, lax.GatherScatterMode.FILL_OR_DROP
_SCATTER = {
    "set": lax.scatter,
    "sum": lax.scatter_add,
    "add": lax.scatter_add,
    "mean": lax.scatter_add,
    "prod": lax.scatter_mul,
    "multiply": lax.scatter_mul,
    "amax": lax.scatter_max,
    "amin": lax.scatter_min,
}


def wrapped(index, size):
    """Return indices with negative ones counted from the end of a dimension of ``size``."""
    if jnp.issubdtype(index.dtype, jnp.unsignedinteger):
        return lax.convert_element_type(index, jnp.int64)
    return lax.select(index < 0, index + jnp.asarray(size, index.dtype), index)


def _window(x, axes, index_ndim):
    """Return where the axes that are not indexed stand in the result: numpy's rule for ``x[:, i, j]``."""
    first = axes[0] if axes[-1] - axes[0] == len(axes) - 1 else 0
    rank = x.ndim - len(axes) + index_ndim
    return tuple(d for d in range(rank) if not first <= d < first + index_ndim)


def _coordinates(indices):
    """Broadcast index arrays against each other and stack them along a new last axis."""
    if len(indices) == 1:
        return lax.expand_dims(indices[0], [indices[0].ndim])
    indices = jnp.broadcast_arrays(*(lax.convert_element_type(i, jnp.int64) for i in indices))
    return jnp.stack(indices, -1)


def read(x, axes, indices):
    """Return ``x`` at index arrays on ``axes`` (ascending), all else in full."""
    at = _coordinates(indices)
    sizes = tuple(1 if d in axes else n for d, n in enumerate(x.shape))
    if 0 in x.shape or 0 in at.shape:
        kept = [n for d, n in enumerate(x.shape) if d not in axes]
        window, batch = _window(x, axes, at.ndim - 1), iter(at.shape[:-1])
        rest = iter(kept)
        shape = [next(rest) if d in window else next(batch) for d in range(len(kept) + at.ndim - 1)]
        return jnp.zeros(shape, x.dtype)
    numbers = lax.GatherDimensionNumbers(_window(x, axes, at.ndim - 1), tuple(axes), tuple(axes))
    return lax.gather(x, at, numbers, sizes, mode=_CLIP)


def write(x, axes, indices, values, how="set"):
    """Return ``x`` with ``values`` (broadcast) written or combined at index arrays on ``axes``."""
    at = _coordinates(indices)
    window = _window(x, axes, at.ndim - 1)
    kept, batch = iter(n for d, n in enumerate(x.shape) if d not in axes), iter(at.shape[:-1])
    shape = [next(kept) if d in window else next(batch) for d in range(x.ndim - len(axes) + at.ndim - 1)]
    if 0 in shape:
        return x
    if x.dtype == jnp.bool_ and how != "set":
        return write(x.astype(jnp.int32), axes, indices, values, how) != 0
    values = jnp.broadcast_to(lax.convert_element_type(values, x.dtype), shape)
    numbers = lax.ScatterDimensionNumbers(window, tuple(axes), tuple(axes))
    return _SCATTER[how](x, at, values, numbers, mode=_DROP)


def _given(x, indices):
    """Return the axes that carry an index and the wrapped indices, from torch's list with ``None``."""
    axes = [d for d, i in enumerate(indices) if i is not None]
    return axes, [wrapped(indices[d], x.shape[d]) for d in axes]


@lowers(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(out, x, indices):
    return read(x, *_given(x, indices))


def _mask_axes(indices):
    """Return pairs (axis, index) of a list that may hold masks, which take as many axes as they have dims."""
    axis = 0
    for i in indices:
        mask = i is not None and i.dtype in (jnp.bool_, jnp.uint8)
        if i is not None:
            yield axis, i != 0 if mask else i
        axis += i.ndim if mask else 1


def _put_at_mask(x, axis, mask, values, accumulate):
    """Return ``x[:, mask] = values`` where ``values`` are the same at every place, or are taken in order."""
    lead, rest = x.shape[:axis], x.shape[axis + mask.ndim :]
    values = lax.reshape(values, (1,) * (len(lead) + 1 + len(rest) - values.ndim) + values.shape)
    if values.shape[axis] == 1:
        values = lax.reshape(values, values.shape[:axis] + (1,) * mask.ndim + values.shape[axis + 1 :])
    else:
        order = jnp.cumsum(mask.reshape(-1), dtype=jnp.int64) - 1
        values = read(values, [axis], [order])
        values = lax.reshape(values, values.shape[:axis] + mask.shape + values.shape[axis + 1 :])
    values = jnp.broadcast_to(values, x.shape)
    mask = lax.broadcast_in_dim(mask, x.shape, range(axis, axis + mask.ndim))
    if not accumulate:
        return lax.select(mask, values, x)
    return lax.select(mask, x | values if x.dtype == jnp.bool_ else x + values, x)


def _mixed(x, pairs, values):
    """Return axes and index arrays of masks beside other indices.

    How many places a mask has is that of the index or the values beside it, where these tell; if not, the
    rows are as long as the largest mask and filled with places past the end, whose values are dropped.
    """
    masks = [i for _, i in pairs if i.dtype == jnp.bool_]
    axes = [axis + k for axis, i in pairs for k in range(i.ndim if i.dtype == jnp.bool_ else 1)]
    rank = max(1 if i.dtype == jnp.bool_ else i.ndim for _, i in pairs)
    window, full = _window(x, axes, rank), x.ndim - len(axes) + rank
    behind = sum(d > min(set(range(full)) - set(window)) for d in window)  # dims after those that are indexed
    known = [i.shape[-1] for _, i in pairs if i.dtype != jnp.bool_ and i.ndim]
    known += [values.shape[-1 - behind]] if values.ndim > behind else []
    known = [n for n in known if n != 1]
    length = known[0] if known else max((i.size for i in masks), default=0)
    counts = [jnp.sum(i) for i in masks]
    most = length if known else jnp.max(jnp.stack(counts)) if masks else 0
    wheres = []
    for axis, i in pairs:
        if i.dtype != jnp.bool_:
            wheres.append(wrapped(i, x.shape[axis]))
            continue
        single = (jnp.sum(i) == 1) & (most > 1)  # one place goes with all others
        for places in jnp.nonzero(i, size=length, fill_value=x.size):
            wheres.append(jnp.where(single, jnp.take(places, 0), places) if length else places)
    return axes, wheres


@lowers(aten.index_put.default, aten._unsafe_index_put.default, aten._index_put_impl.default)
def index_put(out, x, indices, values, accumulate=False, unsafe=False):
    pairs = list(_mask_axes(indices))
    values = lax.convert_element_type(values, x.dtype)
    if not pairs:
        return x + values if accumulate else jnp.broadcast_to(values, x.shape)
    if x.size == 0 or values.size == 0:
        return x
    if len(pairs) == 1 and pairs[0][1].dtype == jnp.bool_:
        return _put_at_mask(x, *pairs[0], values, accumulate)
    axes, wheres = _mixed(x, pairs, values)
    return write(x, axes, wheres, values, "sum" if accumulate else "set")


@lowers(aten._unsafe_masked_index.default)
def unsafe_masked_index(out, x, mask, indices, fill):
    if x.size == 0:
        return jnp.full(out.shape, fill, out.dtype)
    return jnp.where(mask, index(out, x, indices), lax.convert_element_type(fill, x.dtype))


@lowers(aten._unsafe_masked_index_put_accumulate.default)
def unsafe_masked_index_put_accumulate(out, x, mask, indices, values):
    axes, wheres = _given(x, indices)
    wheres = [jnp.clip(i, 0, x.shape[d] - 1) for d, i in zip(axes, wheres, strict=True)]
    return write(x, axes, wheres, jnp.where(mask, values, jnp.zeros((), values.dtype)), "sum")


def _corner(x, index, axis):
    """Return the part of ``x`` that a gather reads: as large as ``index`` on every other axis."""
    limits = [n if d == axis else index.shape[d] for d, n in enumerate(x.shape)]
    return x if limits == list(x.shape) else lax.slice(x, [0] * x.ndim, limits)


@lowers(aten.gather.default)
def gather(out, x, dim, index, *, sparse_grad=False):
    if x.ndim == 0 or index.ndim == 0:
        return jnp.broadcast_to(lax.reshape(x, (x.size,))[0], out.shape)
    if x.size == 0 or index.size == 0:
        return jnp.zeros(out.shape, out.dtype)
    axis = axis_of(dim, x.ndim)
    others = tuple(d for d in range(x.ndim) if d != axis)
    numbers = lax.GatherDimensionNumbers((), (axis,), (axis,), others, others)
    at = lax.expand_dims(wrapped(index, x.shape[axis]), [x.ndim])
    return lax.gather(_corner(x, index, axis), at, numbers, (1,) * x.ndim, mode=_CLIP)


def scatter_along(x, dim, index, source, how="set"):
    """Write or combine ``source`` at ``index`` along ``dim``, as ``torch.scatter`` does."""
    if x.size == 0 or index.size == 0:
        return x
    if x.ndim == 0:
        x1, i1, s1 = (lax.reshape(a, (1,)) if a.ndim == 0 else a for a in (x, index, source))
        return lax.reshape(scatter_along(x1, 0, i1, s1, how), ())
    if index.ndim == 0:
        index = lax.reshape(index, (1,))
        source = lax.reshape(source, (1,)) if source.ndim == 0 else source
    if x.dtype == jnp.bool_ and how != "set":
        return scatter_along(x.astype(jnp.int32), dim, index, source.astype(jnp.int32), how) != 0
    axis = axis_of(dim, x.ndim)
    others = tuple(d for d in range(x.ndim) if d != axis)
    numbers = lax.ScatterDimensionNumbers((), (axis,), (axis,), others, others)
    at = lax.expand_dims(wrapped(index, x.shape[axis]), [x.ndim])
    source = lax.convert_element_type(source, x.dtype)
    if source.ndim == 0:
        source = jnp.broadcast_to(source, index.shape)
    source = lax.slice(source, [0] * x.ndim, index.shape)
    part = _corner(x, index, axis)
    written = _SCATTER[how](part, at, source, numbers, mode=_DROP)
    return written if part is x else lax.dynamic_update_slice(x, written, [0] * x.ndim)


@lowers(aten.scatter.src, aten.scatter.value, aten.scatter.reduce, aten.scatter.value_reduce)
def scatter(out, x, dim, index, source, *, reduce="set"):
    return scatter_along(x, dim, index, cast(source, x.dtype), reduce)


@lowers(aten.scatter_add.default)
def scatter_add(out, x, dim, index, source):
    return scatter_along(x.astype(compute_dtype(x.dtype)), dim, index, source, "sum").astype(x.dtype)


def neutral(how, dtype):
    """Return the start value that leaves the result of a reduction to its other elements."""
    if how in ("sum", "mean", "prod", "multiply", "add"):
        return jnp.asarray(how in ("prod", "multiply"), dtype)
    if dtype == jnp.bool_:
        return jnp.asarray(how == "amin", dtype)
    limits = jnp.iinfo(dtype) if jnp.issubdtype(dtype, jnp.integer) else None
    if limits is None:
        return jnp.asarray(-math.inf if how == "amax" else math.inf, dtype)
    return jnp.asarray(limits.min if how == "amax" else limits.max, dtype)


def _reduced_into(x, how, include_self, place, dim, index, source):
    """Return a reduction of torch of ``source`` into ``x``, where ``place`` puts elements or slices."""
    wide = compute_dtype(x.dtype)
    start = lax.convert_element_type(x, wide)
    counted = how == "mean" or not include_self
    counts = place(jnp.zeros(x.shape, wide), dim, index, jnp.asarray(1), "sum") if counted else None
    if not include_self:
        start = jnp.where(counts != 0, neutral(how, wide), start)
    result = place(start, dim, index, source, how)
    if how == "mean":
        counts = jnp.maximum(counts + (1 if include_self else 0), 1) if wide != jnp.bool_ else counts
        floats = jnp.issubdtype(wide, jnp.inexact)
        result = result / counts if floats else jnp.floor_divide(result, counts)
    return lax.convert_element_type(result, x.dtype)


@lowers(aten.scatter_reduce.two)
def scatter_reduce(out, x, dim, index, source, reduce, *, include_self=True):
    return _reduced_into(x, reduce, include_self, scatter_along, dim, index, source)


@lowers(aten.index_reduce.default)
def index_reduce(out, x, dim, index, source, reduce, *, include_self=True):
    return _reduced_into(x, reduce, include_self, _rows, dim, index, source)


@lowers(aten.index_select.default)
def index_select(out, x, dim, index):
    if x.ndim == 0:
        return jnp.broadcast_to(x, out.shape)
    return read(x, [axis_of(dim, x.ndim)], [lax.reshape(index, (index.size,))])


def _rows(x, dim, index, source, how):
    """Write or combine ``source`` into the slices ``index`` of ``dim``."""
    if x.ndim == 0:
        source = lax.reshape(source, (source.size,)) if source.ndim else source
        return lax.reshape(_rows(lax.reshape(x, (1,)), 0, index, source, how), ())
    axis = axis_of(dim, x.ndim)
    return write(x, [axis], [wrapped(lax.reshape(index, (index.size,)), x.shape[axis])], source, how)


@lowers(aten.index_add.default)
def index_add(out, x, dim, index, source, *, alpha=1):
    if x.dtype == jnp.bool_:
        return _rows(x, dim, index, source & jnp.asarray(alpha, jnp.bool_), "sum")
    wide = compute_dtype(x.dtype)
    source = source.astype(wide) * lax.convert_element_type(alpha, wide)
    return _rows(x.astype(wide), dim, index, source, "sum").astype(x.dtype)


@lowers(aten.index_copy.default, aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def index_copy(out, x, dim, index, source):
    return _rows(x, dim, index, cast(source, x.dtype), "set")


@lowers(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(out, x, mask, value):
    value = cast(value, out.dtype)
    if mask.shape == x.shape == out.shape:
        return lax.select(mask, lax.broadcast(value, out.shape), x)
    return jnp.where(mask, value, jnp.broadcast_to(x, out.shape))


@lowers(aten.masked_scatter.default)
def masked_scatter(out, x, mask, source):
    mask = jnp.broadcast_to(mask, out.shape)
    if source.size == 0 or mask.size == 0:
        return jnp.broadcast_to(x, out.shape)
    order = lax.reshape(jnp.cumsum(mask.reshape(-1), dtype=jnp.int64) - 1, out.shape)
    return jnp.where(mask, read(lax.reshape(source, (source.size,)), [0], [order]), x)


@lowers(aten.masked_scatter_backward.default)
def masked_scatter_backward(out, grad, mask, sizes):
    mask = jnp.broadcast_to(mask, grad.shape).reshape(-1)
    order = jnp.where(mask, jnp.cumsum(mask, dtype=jnp.int64) - 1, math.prod(out.shape))
    flat = write(jnp.zeros(math.prod(out.shape), out.dtype), [0], [order], grad.reshape(-1))
    return lax.reshape(flat, out.shape)


@lowers(aten.take.default)
def take(out, x, index):
    return read(lax.reshape(x, (x.size,)), [0], [wrapped(index, x.size)])


@lowers(aten.put.default)
def put(out, x, index, source, accumulate=False):
    flat = lax.reshape(x, (x.size,))
    at, source = wrapped(index.reshape(-1), x.size), source.reshape(-1)
    return lax.reshape(write(flat, [0], [at], source, "sum" if accumulate else "set"), x.shape)


@lowers(aten.embedding.default)
def embedding(out, weight, indices, padding_idx=-1, scale_grad_by_freq=False, sparse=False):
    return read(weight, [0], [indices])


@lowers(aten.embedding_dense_backward.default)
def embedding_dense_backward(out, grad, indices, num_weights, padding_idx, scale_grad_by_freq):
    at = lax.reshape(indices, (indices.size,))
    rows = lax.reshape(grad, (indices.size, *out.shape[1:]))
    if padding_idx >= 0:  # a row past the end is dropped
        at = lax.select(at == padding_idx, lax.full_like(at, num_weights), at)
    if scale_grad_by_freq:
        counts = write(jnp.zeros(num_weights, jnp.float32), [0], [at], jnp.float32(1), "sum")
        rows = (rows / read(counts, [0], [at])[:, None]).astype(rows.dtype)
    total = jnp.zeros(out.shape, compute_dtype(out.dtype))
    return write(total, [0], [at], rows, "sum").astype(out.dtype)


@lowers(aten._masked_scale.default, dynamic="scale")
def masked_scale(out, x, mask, scale):
    return (x.astype(out.dtype) * mask.astype(out.dtype) * scale).astype(out.dtype)


@lowers(aten.embedding_renorm.default, dynamic="max_norm")
def embedding_renorm(out, weight, indices, max_norm, norm_type):
    norms = jnp.linalg.norm(weight.astype(jnp.float32), ord=norm_type, axis=1, keepdims=True)
    used = write(jnp.zeros(weight.shape[0], jnp.bool_), [0], [indices.reshape(-1)], jnp.bool_(True))
    scale = jnp.where(used[:, None] & (norms > max_norm), max_norm / (norms + 1e-7), 1)
    return (weight * scale).astype(out.dtype)
