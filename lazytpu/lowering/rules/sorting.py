"""Sorting, order statistics and search in sorted data.  NaN is the greatest value, as in torch."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from ..registry import lowers, target_platform
from .equal_values import elements, kth_places, order_key, sort_places, top_places
from .indexing import gather
from .operands import result_dtype
from .reductions import axes_of, wide
from .shape import axis_of

aten = torch.ops.aten


def sorted_pair(x, axis, descending=False):
    """Values and their places (i64), stable."""
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int64)
    places = lax.broadcasted_iota(jnp.int64, x.shape, axis)
    if not descending:
        return lax.sort((x, places), dimension=axis, num_keys=1)
    # reversed before and after: descending, and equal values keep their order
    values, places = lax.sort((lax.rev(x, [axis]), lax.rev(places, [axis])), dimension=axis, num_keys=1)
    return lax.rev(values, [axis]), lax.rev(places, [axis])


_MOST_FOLLOWED = 1 << 16  # elements; the order of equal ones costs about 0.1 us an element, twenty times a `top_k`


def _follows_eager(x):
    """Whether equal values are ordered as eager does on the CPU.

    Elsewhere, in large arrays and where sizes are open, they keep their order.
    """
    fixed = all(isinstance(n, int) for n in x.shape)
    return target_platform() == "cpu" and fixed and 0 < x.size <= _MOST_FOLLOWED


def _as_eager_orders(x, axis, descending, sorted_values, places, find):
    """``places``, or what ``find`` gives for rows of elements, if there are equal values.

    ``sorted_values`` are those of ``x`` among which equal ones count.
    """
    key, n = order_key(sorted_values), sorted_values.shape[axis]
    equal = jnp.any(lax.slice_in_dim(key, 1, n, axis=axis) == lax.slice_in_dim(key, 0, n - 1, axis=axis))

    def found():
        rows = jnp.moveaxis(order_key(x, descending), axis, -1)
        ordered = find(elements(lax.reshape(rows, (x.size // x.shape[axis], x.shape[axis]))))
        return jnp.moveaxis(ordered.reshape(*rows.shape[:-1], places.shape[axis]), -1, axis).astype(places.dtype)

    return lax.cond(equal, found, lambda: places)


def unstable_pair(x, axis, descending=False):
    """Values and their places (i64), equal values in the order of eager's unstable sort."""
    values, places = sorted_pair(x, axis, descending)
    if x.ndim == 0 or not _follows_eager(x) or x.shape[axis] <= 16:  # which it keeps in order
        return values, places
    return values, _as_eager_orders(x, axis, descending, values, places, sort_places)


@lowers(aten.sort.default, aten.sort.stable)
def sort(out, x, dim=-1, descending=False, *, stable=None):
    whole = x.ndim == 1 and not descending and jnp.issubdtype(x.dtype, jnp.integer)
    by_digits = whole and x.size >= 2**15  # which keeps equal values in order
    return (sorted_pair if stable or by_digits else unstable_pair)(x, axis_of(dim, x.ndim), descending)


@lowers(aten.argsort.default)
def argsort(out, x, dim=-1, descending=False, *, stable=False):
    return sort((), x, dim, descending, stable=stable)[1]


@lowers(aten.argsort.stable)
def argsort_stable(out, x, *, stable, dim=-1, descending=False):
    return argsort(out, x, dim, descending, stable=stable)


@lowers(aten.topk.default)
def topk(out, x, k, dim=-1, largest=True, sorted=True):
    if 0 in out[0].shape:
        return tuple(jnp.zeros(o.shape, o.dtype) for o in out)
    if x.ndim == 0:
        return jnp.broadcast_to(x, out[0].shape), jnp.zeros(out[1].shape, out[1].dtype)
    axis, floating = axis_of(dim, x.ndim), jnp.issubdtype(x.dtype, jnp.floating)
    if x.dtype == jnp.bool_ or (floating and not largest and target_platform() != "cpu"):
        values, places = sorted_pair(x, axis, largest)
        return tuple(lax.slice_in_dim(a, 0, k, axis=axis) for a in (values, places))
    if floating:  # the sign of a NaN says whether it comes first or last; XLA's fast kernel is for f32
        key = lax.convert_element_type(x, wide(x.dtype))
        nan = jnp.asarray(np.copysign(np.nan, 1 if largest else -1), key.dtype)
        key = jnp.where(jnp.isnan(key), nan, key if largest else -key)
    else:
        key = x if largest else ~x
    follows = _follows_eager(x)
    last = min(k + 1, x.shape[axis]) if follows else k  # the next one may be equal to it
    best, places = (jnp.moveaxis(a, -1, axis) for a in lax.top_k(jnp.moveaxis(key, axis, -1), last))
    # XLA has a kernel for `top_k` unless parts of its result are used: so these are taken from its bits.
    values = best if best.dtype != jnp.float32 else lax.bitcast_convert_type(best, jnp.int32)
    values, places = (lax.slice_in_dim(a, 0, k, axis=axis) for a in (values, places.astype(jnp.int64)))
    values = lax.bitcast_convert_type(values, best.dtype) if floating else values
    if follows:
        places = _as_eager_orders(x, axis, largest, best, places, lambda rows: top_places(rows, k))
    values = values if largest else -values if floating else ~values
    return values.astype(x.dtype), places


def _pick(out, x, axis, values, places, at):
    """Values and places at position ``at`` (broadcast) of the sorted axis, without that axis."""
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int64)
    shape = [1 if d == axis else n for d, n in enumerate(x.shape)]
    at = jnp.broadcast_to(at, shape)
    picked = (gather(at, a, axis, at) for a in (values, places))
    return tuple(lax.reshape(a, o.shape) for a, o in zip(picked, out, strict=True))


@lowers(aten.kthvalue.default)
def kthvalue(out, x, k, dim=-1, keepdim=False):
    if x.size == 0:
        return tuple(jnp.zeros(o.shape, o.dtype) for o in out)
    axis = axis_of(dim, x.ndim)
    values, places = sorted_pair(x, axis)
    picked = _pick(out, x, axis, values, places, jnp.int64(k - 1))
    if x.ndim == 0 or not _follows_eager(x) or x.shape[axis] < 3:
        return picked
    near = lax.slice_in_dim(values, max(k - 2, 0), min(k + 1, x.shape[axis]), axis=axis)
    place = lax.expand_dims(picked[1], [axis] if len(out[1].shape) < x.ndim else [])
    place = _as_eager_orders(x, axis, False, near, place, lambda rows: kth_places(rows, k - 1))
    return picked[0], lax.reshape(place, out[1].shape)


def _middle(out, x, axis, skip_nan):
    if x.size == 0:
        return tuple(jnp.zeros(o.shape, o.dtype) for o in out)
    values, places = sorted_pair(x, axis)
    if x.ndim == 0:
        return values, places
    n = x.shape[axis]
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return _pick(out, x, axis, values, places, jnp.int64((n - 1) // 2))
    numbers = jnp.sum(~jnp.isnan(x), axis, keepdims=True, dtype=jnp.int64)
    if skip_nan:
        at = jnp.maximum(numbers - 1, 0) // 2
    else:  # NaNs are last: the first of them, if any
        at = jnp.where(numbers < n, numbers, (n - 1) // 2)
    return _pick(out, x, axis, values, places, at)


@lowers(aten.median.dim)
def median_dim(out, x, dim, keepdim=False):
    return _middle(out, x, axis_of(dim, x.ndim), skip_nan=False)


@lowers(aten.nanmedian.dim)
def nanmedian_dim(out, x, dim, keepdim=False):
    return _middle(out, x, axis_of(dim, x.ndim), skip_nan=True)


_NAN_AS = {"int32": -(2**31), "int64": -(2**63)}  # what C's cast of NaN gives, where it is not 0


def _middle_of_all(out, x, skip_nan):
    if x.size == 0:
        return jnp.full((), _NAN_AS.get(x.dtype.name, 0) if jnp.issubdtype(x.dtype, jnp.integer) else jnp.nan, x.dtype)
    return _middle((out, out), lax.reshape(x, (x.size,)), 0, skip_nan)[0]


@lowers(aten.median.default)
def median(out, x):
    return _middle_of_all(out, x, skip_nan=False)


@lowers(aten.nanmedian.default)
def nanmedian(out, x):
    return _middle_of_all(out, x, skip_nan=True)


@lowers(aten.mode.default)
def mode(out, x, dim=-1, keepdim=False):
    if x.size == 0:
        return tuple(jnp.zeros(o.shape, o.dtype) for o in out)
    axis = axis_of(dim, x.ndim)
    values, places = unstable_pair(x, axis)
    if x.ndim == 0:
        return values, places
    n, here = x.shape[axis], lax.broadcasted_iota(jnp.int32, x.shape, axis)
    before = lax.concatenate(
        [lax.slice_in_dim(values, 0, 1, axis=axis), lax.slice_in_dim(values, 0, n - 1, axis=axis)], axis
    )
    run_start = lax.cummax(jnp.where(values != before, here, 0), axis=axis)
    at = lax.expand_dims(lax.argmax(here - run_start, axis, jnp.int64), [axis])  # the end of the first longest run
    return _pick(out, x, axis, values, places, at)


def lower_bound(sequence, values, right=False):
    """How many elements of sorted rows ``[..., n]`` come before each of ``values [..., m]`` (i64).

    ``right`` counts equal elements too.  A row without leading dims serves all values.
    """
    n = sequence.shape[-1]
    if sequence.ndim == 1 or values.ndim == 0:
        rows, found = lax.reshape(sequence, (1, n)), lax.reshape(values, (1, values.size))
    else:
        rows, found = (lax.reshape(a, (math.prod(a.shape[:-1]), a.shape[-1])) for a in (sequence, values))
    low, high = jnp.zeros(found.shape, jnp.int64), jnp.full(found.shape, n, jnp.int64)

    def halve(_, ends):
        low, high = ends
        middle = (low + high) // 2
        element = gather(middle, rows, 1, middle)
        after = ~(element > found) if right else ~(element >= found)
        after &= low < high
        return jnp.where(after, middle + 1, low), jnp.where(after, high, middle)

    low, _ = lax.fori_loop(0, n.bit_length(), halve, (low, high))
    return lax.reshape(low, values.shape)


@lowers(aten.searchsorted.Tensor, aten.searchsorted.Scalar)
def searchsorted(out, sequence, values, *, out_int32=False, right=False, side=None, sorter=None):
    if sorter is not None:
        sequence = gather(sequence, sequence, -1, sorter)
    values = jnp.asarray(values)
    if sequence.shape[-1] == 0 or values.size == 0:
        return jnp.zeros(out.shape, out.dtype)
    if values.ndim == 0 and not jnp.issubdtype(sequence.dtype, jnp.integer):
        values = values.astype(sequence.dtype)
    common = jnp.promote_types(sequence.dtype, values.dtype)
    found = lower_bound(sequence.astype(common), values.astype(common), right or side == "right")
    return found.astype(out.dtype)


@lowers(aten.bucketize.Tensor, aten.bucketize.Scalar)
def bucketize(out, values, boundaries, *, out_int32=False, right=False):
    return searchsorted(out, boundaries, values, right=right)


@lowers(aten.isin.Tensor_Tensor, aten.isin.Tensor_Scalar, aten.isin.Scalar_Tensor)
def isin(out, elements, test_elements, *, assume_unique=False, invert=False):
    elements, tests = jnp.asarray(elements), jnp.asarray(test_elements)
    if elements.size == 0 or tests.size == 0:
        return jnp.full(out.shape, invert)
    kind = result_dtype(elements, tests)
    elements, tests = elements.astype(kind), tests.astype(kind).reshape(-1)
    if tests.size <= 64:
        found = lax.reduce_or(elements[..., None] == tests, axes_of(-1, elements.ndim + 1))
    else:
        tests = lax.sort(tests)
        at = jnp.minimum(lower_bound(tests, elements), tests.size - 1)
        found = jnp.take(tests, at, mode="clip") == elements
    return ~found if invert else found


@lowers(aten.repeat_interleave.Tensor)
def repeat_interleave(out, repeats, *, output_size=None):
    place = jnp.arange(out.shape[0])
    return lower_bound(jnp.cumsum(repeats.astype(jnp.int64)), place, right=True).astype(out.dtype)
