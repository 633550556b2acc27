"""Sorting, order statistics and search in sorted data.

NaN is the greatest value, as in torch.  Equal values keep their order, whether a stable sort is asked for or not.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from lazytpu.lowering.registry import lowers, target_platform
from lazytpu.lowering.rules.indexing import gather
from lazytpu.lowering.rules.reductions import axes_of, wide
from lazytpu.lowering.rules.shape import axis_of
from lazytpu.lowering.support.operands import result_dtype
from lazytpu.lowering.support.sort_keys import at_places, order_key, places_in_order

aten = torch.ops.aten


def sorted_pair(x, axis, descending=False):
    """Return the values in order and their indices (i64), equal values in the order they have."""
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int64)
    if target_platform() == "cpu":
        places = places_in_order(order_key(x, descending), axis)
        return at_places(x, places, axis), places
    places = lax.broadcasted_iota(jnp.int64, x.shape, axis)
    if not descending:
        return lax.sort((x, places), dimension=axis, num_keys=1)
    # reversed before and after: descending, and equal values keep their order
    values, places = lax.sort((lax.rev(x, [axis]), lax.rev(places, [axis])), dimension=axis, num_keys=1)
    return lax.rev(values, [axis]), lax.rev(places, [axis])


@lowers(aten.sort.default, aten.sort.stable)
def sort(out, x, dim=-1, descending=False, *, stable=None):
    return sorted_pair(x, axis_of(dim, x.ndim), descending)


@lowers(aten.argsort.default, aten.argsort.stable)
def argsort(out, x, dim=-1, descending=False, *, stable=False):
    return sorted_pair(x, axis_of(dim, x.ndim), descending)[1]


def _best(x, axis, count, largest):
    """Return the ``count`` greatest or least values and their places (i64), equal ones in the order they have."""
    on_cpu, floating = target_platform() == "cpu", jnp.issubdtype(x.dtype, jnp.floating)
    if on_cpu:  # XLA's fast kernel is for f32, and takes longer than a sort where it has much to find
        n = x.shape[axis]
        by_sort = x.dtype.itemsize > (4 if floating else 2) or (isinstance(n, int) and 8 * count >= n)
    else:
        by_sort = x.dtype == jnp.bool_ or (floating and not largest)
    if by_sort:
        values, places = sorted_pair(x, axis, largest)
        return tuple(lax.slice_in_dim(a, 0, count, axis=axis) for a in (values, places))
    if floating:  # the sign of a NaN says whether it comes first or last
        key = lax.convert_element_type(x, wide(x.dtype))
        nan = jnp.asarray(np.copysign(np.nan, 1 if largest else -1), key.dtype)
        key = jnp.where(jnp.isnan(key), nan, key if largest else -key)
        key = jnp.where(key == 0, 0, key) if on_cpu else key
    elif on_cpu:
        key = x.astype(jnp.float32) if largest else -x.astype(jnp.float32)
    else:
        key = x if largest else ~x
    best, places = (jnp.moveaxis(a, -1, axis) for a in lax.top_k(jnp.moveaxis(key, axis, -1), count))
    places = places.astype(jnp.int64)
    if on_cpu:  # XLA does not use its kernel where parts of ``best`` are used
        return at_places(x, places, axis), places
    return (best if largest else -best if floating else ~best).astype(x.dtype), places


@lowers(aten.topk.default)
def topk(out, x, k, dim=-1, largest=True, sorted=True):
    if 0 in out[0].shape:
        return tuple(jnp.zeros(o.shape, o.dtype) for o in out)
    if x.ndim == 0:
        return jnp.broadcast_to(x, out[0].shape), jnp.zeros(out[1].shape, out[1].dtype)
    return _best(x, axis_of(dim, x.ndim), k, largest)


def _pick(out, x, axis, values, places, at):
    """Return values and places at position ``at`` (broadcast) of the sorted axis, without that axis."""
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
    return _pick(out, x, axis, *sorted_pair(x, axis), jnp.int64(k - 1))


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
    values, places = sorted_pair(x, axis)
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
    """Return how many elements of sorted rows ``[..., n]`` come before each of ``values [..., m]`` (i64).

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
