"""Reductions over segments and bags of rows: ``segment_reduce`` and ``embedding_bag``."""

from __future__ import annotations

import math

import jax.numpy as jnp
import torch
from jax import lax

from lazytpu.lowering.registry import lowers
from lazytpu.lowering.rules.indexing import neutral, read, scatter_along, write
from lazytpu.lowering.rules.sorting import lower_bound

aten = torch.ops.aten

_SUM, _MEAN, _MAX = range(3)
_START = {"sum": 0, "mean": 0, "prod": 1, "max": -math.inf, "min": math.inf}
_COMBINE = {"sum": "sum", "mean": "sum", "prod": "prod", "max": "amax", "min": "amin"}


class _Segments:
    """Which segment each place of a segmented axis belongs to; leading axes are folded into the segments."""

    def __init__(self, data, lengths, offsets, axis):
        if offsets is None:
            ends = jnp.cumsum(lengths.astype(jnp.int64), -1)
            starts = ends - lengths
        else:
            starts, ends = offsets[..., :-1], offsets[..., 1:]
        self.rest = data.shape[axis + 1 :]
        self.lengths = (ends - starts).reshape(-1)
        self.count = self.lengths.size
        rows, self.per_row = math.prod(data.shape[:axis]), starts.shape[-1]
        place = jnp.broadcast_to(jnp.arange(data.shape[axis]), (rows, data.shape[axis]))
        within = lower_bound(ends.reshape(rows, -1), place, right=True)
        segment = within + self.per_row * jnp.arange(rows)[:, None]
        outside = (within >= self.per_row) | (place < starts.reshape(rows, -1)[:, :1])
        self.ids = jnp.where(outside, self.count, segment).reshape(-1)

    def rows(self, data):
        """Return ``data`` with one row for each place."""
        return data.reshape(-1, *self.rest)

    def column(self, per_segment):
        """Return a number for each segment, made to broadcast against results."""
        return per_segment.reshape(-1, *(1,) * len(self.rest))

    def reduce(self, data, how, start):
        """Return the reduction of the rows of each segment, from a start value."""
        result = jnp.broadcast_to(jnp.asarray(start).astype(data.dtype), (self.count, *self.rest))
        return write(result, [0], [self.ids], self.rows(data), how)

    def spread(self, per_segment):
        """Return the result of its segment for each place."""
        return read(per_segment, [0], [self.ids])


@lowers(aten.segment_reduce.default)
def segment_reduce(out, data, reduce, *, lengths=None, indices=None, offsets=None, axis=0, unsafe=False, initial=None):
    if 0 in out.shape or data.size == 0:
        start = _START[reduce] if initial is None else initial
        start = jnp.nan if reduce == "mean" and initial is None else start
        return jnp.broadcast_to(jnp.asarray(start).astype(out.dtype), out.shape)
    segments = _Segments(data, lengths, offsets, axis)
    result = segments.reduce(data, _COMBINE[reduce], _START[reduce] if initial is None else initial)
    if reduce == "mean":
        size = segments.column(segments.lengths).astype(out.dtype)
        if initial is not None:
            size = jnp.maximum(size, 1)
        result = result / size
    return result.reshape(out.shape)


@lowers(aten._segment_reduce_backward.default)
def segment_reduce_backward(out, grad, output, data, reduce, *, lengths=None, offsets=None, axis=0, initial=None):
    if data.size == 0 or grad.size == 0:
        return jnp.zeros(out.shape, out.dtype)
    segments = _Segments(data, lengths, offsets, axis)
    rows, grad = segments.rows(data), grad.reshape(-1, *segments.rest)
    inside = (segments.ids < segments.count).reshape(-1, *(1,) * len(segments.rest))
    if reduce == "mean":
        grad = grad / jnp.maximum(segments.column(segments.lengths), 1).astype(grad.dtype)
    result = segments.spread(grad)
    if reduce in ("max", "min"):
        best = segments.spread(output.reshape(-1, *segments.rest))
        hit = ((rows == best) | jnp.isnan(rows)) & inside
        ties = segments.reduce(hit.astype(grad.dtype), "sum", 0)
        result = jnp.where(hit, segments.spread(grad / jnp.maximum(ties, 1)), jnp.zeros((), grad.dtype))
    if reduce == "prod":
        result = result * _others(segments, rows, 1 if initial is None else initial)
    return jnp.where(inside, result, jnp.zeros((), grad.dtype)).reshape(out.shape)


def _others(segments, rows, initial):
    """Return the product of the other elements of its segment for each place, right for zeros and NaNs."""
    zero, nan = rows == 0, jnp.isnan(rows)
    ordinary = jnp.where(zero | nan, jnp.ones((), rows.dtype), rows)
    product = segments.spread(segments.reduce(ordinary, "prod", initial))
    zeros, nans = (segments.spread(segments.reduce(a.astype(rows.dtype), "sum", 0)) for a in (zero, nan))
    product = jnp.where(zeros - zero > 0, jnp.zeros((), rows.dtype), product / ordinary)
    return jnp.where(nans - nan > 0, jnp.asarray(jnp.nan, rows.dtype), product)


def _bag_of(indices, offsets, bags):
    """Return the bag of each index, from where the bags start."""
    starts = offsets[:bags]
    return lower_bound(starts.astype(jnp.int64), jnp.arange(indices.shape[0]), right=True) - 1


def _fitted(out, x):
    """Return a result in the size torch predicts: kernels leave out what the chosen mode does not need."""
    if x.shape == out.shape:
        return x.astype(out.dtype)
    zeros = jnp.zeros(out.shape, out.dtype)
    fits = x.ndim == len(out.shape) == 1 and x.size < zeros.size
    return lax.dynamic_update_slice(zeros, x.astype(out.dtype), (0,)) if fits else zeros


def _bag_sizes(indices, bag, bags, padding_idx):
    """Return how many indices of each bag are not padding, and the bag of each index (``bags`` for padding)."""
    at = jnp.where(indices == padding_idx, bags, bag) if padding_idx >= 0 else bag
    return write(jnp.zeros(bags, jnp.int64), [0], [at], jnp.int64(1), "sum"), at


@lowers(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def embedding_bag(
    out,
    weight,
    indices,
    offsets,
    scale_grad_by_freq=False,
    mode=_SUM,
    sparse=False,
    per_sample_weights=None,
    include_last_offset=False,
    padding_idx=-1,
):
    bags, width = out[0].shape
    if indices.size == 0:
        return tuple(jnp.zeros(o.shape, o.dtype) for o in out)
    bag = _bag_of(indices, offsets, bags)
    sizes, at = _bag_sizes(indices, bag, bags, padding_idx)
    wide = jnp.float32 if weight.dtype in (jnp.float16, jnp.bfloat16) else weight.dtype
    rows = read(weight, [0], [indices]).astype(wide)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[:, None].astype(wide)
    if mode != _MAX:
        if include_last_offset and weight.dtype != jnp.float64 and padding_idx < 0:  # else eager ignores it, too
            at = jnp.where(jnp.arange(indices.shape[0]) < offsets[-1], at, bags)
        result = write(jnp.zeros((bags, width), wide), [0], [at], rows, "sum")
        if mode == _MEAN:
            result = result / jnp.maximum(sizes, 1)[:, None].astype(wide)
        return result.astype(out[0].dtype), _fitted(out[1], bag), _fitted(out[2], sizes), _fitted(out[3], sizes)
    result = write(jnp.full((bags, width), neutral("amax", wide)), [0], [at], rows, "amax")
    hit = (rows == read(result, [0], [bag])) & (at < bags)[:, None]
    order = jnp.where(hit, jnp.arange(indices.shape[0])[:, None], indices.shape[0])
    first = write(jnp.full((bags, width), indices.shape[0], jnp.int64), [0], [at], order, "amin")
    chosen = jnp.where(first < indices.shape[0], read(indices, [0], [first]), 0)
    result = jnp.where(sizes[:, None] > 0, result, jnp.zeros((), wide))
    return result.astype(out[0].dtype), _fitted(out[1], bag), _fitted(out[2], sizes), _fitted(out[3], chosen)


@lowers(aten._embedding_bag_dense_backward.default)
def embedding_bag_dense_backward(
    out,
    grad,
    indices,
    offset2bag,
    bag_size,
    maximum_indices,
    num_weights,
    scale_grad_by_freq,
    mode,
    per_sample_weights,
    padding_idx=-1,
):
    zeros = jnp.zeros(out.shape, out.dtype)
    if indices.size == 0 or grad.size == 0:
        return zeros
    if mode == _MAX:
        full = bag_size[: grad.shape[0], None] > 0
        return scatter_along(zeros, 0, jnp.where(full, maximum_indices, num_weights), grad, "sum")
    rows = read(grad, [0], [offset2bag])
    if per_sample_weights is not None:
        rows = rows * per_sample_weights[:, None]
    if mode == _MEAN:
        rows = rows / jnp.maximum(read(bag_size, [0], [offset2bag]), 1)[:, None].astype(rows.dtype)
    if scale_grad_by_freq:
        counts = write(jnp.zeros(num_weights, jnp.float32), [0], [indices], jnp.float32(1), "sum")
        rows = (rows / read(counts, [0], [indices])[:, None]).astype(rows.dtype)
    at = jnp.where(indices == padding_idx, num_weights, indices) if padding_idx >= 0 else indices
    return write(zeros, [0], [at], rows, "sum")


@lowers(aten._embedding_bag_backward.default)
def embedding_bag_backward(
    out,
    grad,
    indices,
    offsets,
    offset2bag,
    bag_size,
    maximum_indices,
    num_weights,
    scale_grad_by_freq,
    mode,
    sparse,
    per_sample_weights,
    padding_idx=-1,
):
    bag = _bag_of(indices, offsets, grad.shape[0])
    sizes, _ = _bag_sizes(indices, bag, grad.shape[0], padding_idx)
    rest = (num_weights, scale_grad_by_freq, mode, per_sample_weights, padding_idx)
    return embedding_bag_dense_backward(out, grad, indices, bag, sizes, maximum_indices, *rest)


@lowers(aten._embedding_bag_per_sample_weights_backward.default)
def embedding_bag_per_sample_weights_backward(out, grad, weight, indices, offsets, offset2bag, mode, padding_idx=-1):
    if indices.size == 0:
        return jnp.zeros(out.shape, out.dtype)
    bag = offset2bag if offset2bag.shape == indices.shape else _bag_of(indices, offsets, grad.shape[0])
    result = jnp.sum(read(grad, [0], [bag]) * read(weight, [0], [indices]), -1)
    if padding_idx >= 0:
        result = jnp.where(indices == padding_idx, jnp.zeros((), result.dtype), result)
    return result.astype(out.dtype)
