"""Sums, products, extremes, moments and scans along dims.

Half precision accumulates in float32 and rounds once; integers accumulate in int64, as in eager torch.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import torch
from jax import lax

from lazytpu.lowering.registry import lowers, on_mesh
from lazytpu.lowering.rules.shape import axis_of
from lazytpu.lowering.support import sums
from lazytpu.lowering.support.complex_functions import exp, quotient
from lazytpu.lowering.support.maxima import extreme, shift
from lazytpu.lowering.support.operands import cast

aten = torch.ops.aten

_HALF = (jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16))


def wide(dtype):
    """Return the dtype that eager computes a reduction to ``dtype`` in."""
    return jnp.dtype(jnp.float32) if dtype in _HALF else jnp.dtype(dtype)


def axes_of(dim, ndim):
    """Return axes of a ``dim`` argument; None and the empty list mean all."""
    if dim is None or (not isinstance(dim, int) and not len(dim)):
        return tuple(range(ndim))
    if ndim == 0:
        return ()
    return tuple(axis_of(d, ndim) for d in ([dim] if isinstance(dim, int) else dim))


def count_of(x, axes):
    """Return how many elements one result of a reduction over ``axes`` takes in."""
    return math.prod(x.shape[a] for a in axes)


def _finish(out, x):
    """Round to the result's dtype and restore the dims that ``keepdim`` keeps."""
    x = lax.convert_element_type(x, out.dtype)
    return x if x.shape == out.shape else lax.reshape(x, out.shape)


def keep(x, axes):
    """Put reduced axes back with size one."""
    return lax.expand_dims(x, sorted(axes)) if axes else x


@lowers(aten.sum.default, aten.sum.dim_IntList)
def sum_(out, x, dim=None, keepdim=False, *, dtype=None):
    if out.dtype == jnp.bool_:
        return any_(out, x, dim)
    x = cast(x, wide(out.dtype))
    axes = axes_of(dim, x.ndim)
    if x.ndim > 1 and sorted(axes) == list(range(x.ndim - 1)):  # mostly the gradient of a bias
        return _finish(out, sums.total_of_rows(x))
    return _finish(out, sums.in_stages(x, axes))


@lowers(aten.nansum.default)
def nansum(out, x, dim=None, keepdim=False, *, dtype=None):
    if jnp.issubdtype(x.dtype, jnp.inexact):
        x = jnp.where(jnp.isnan(x), jnp.zeros((), x.dtype), x)
    return sum_(out, x, dim)


@lowers(aten.mean.default, aten.mean.dim)
def mean(out, x, dim=None, keepdim=False, *, dtype=None):
    axes = axes_of(dim, x.ndim)
    x = lax.convert_element_type(x, wide(out.dtype))
    total = sums.in_stages(x, axes)
    return _finish(out, quotient(total, lax.full_like(total, count_of(x, axes))))


@lowers(aten.prod.default, aten.prod.dim_int)
def prod(out, x, dim=None, keepdim=False, *, dtype=None):
    if out.dtype == jnp.bool_:
        return all_(out, x, dim)
    x = cast(x, wide(out.dtype))
    return _finish(out, lax.reduce_prod(x, axes_of(dim, x.ndim)))


@lowers(aten.any.default, aten._is_any_true.default, aten.any.dim, aten.any.dims)
def any_(out, x, dim=None, keepdim=False):
    axes = () if isinstance(dim, list | tuple) and not dim else axes_of(dim, x.ndim)
    return _finish(out, lax.reduce_or(x if x.dtype == jnp.bool_ else x != 0, axes))


@lowers(aten.all.default, aten._is_all_true.default, aten.all.dim, aten.all.dims)
def all_(out, x, dim=None, keepdim=False):
    axes = () if isinstance(dim, list | tuple) and not dim else axes_of(dim, x.ndim)
    return _finish(out, lax.reduce_and(x if x.dtype == jnp.bool_ else x != 0, axes))


@lowers(aten.count_nonzero.default, aten.count_nonzero.dim_IntList)
def count_nonzero(out, x, dim=None):
    return _finish(out, lax.reduce_sum((x != 0).astype(jnp.int64), axes_of(dim, x.ndim)))


def _extreme(out, x, dim, largest):
    axes = axes_of(dim, x.ndim)
    if x.size == 0:
        return jnp.zeros(out.shape, out.dtype)
    if x.dtype == jnp.bool_:
        return _finish(out, (lax.reduce_or if largest else lax.reduce_and)(x, axes))
    return _finish(out, extreme(x, axes, largest))


def _where_extreme(out, x, dim, largest):
    """Return the first place of the extreme; NaN counts as the extreme."""
    if dim is None:
        x, axis = lax.reshape(x, (x.size,)), 0
    elif x.ndim == 0 or x.size == 0:
        return jnp.zeros(out.shape, out.dtype)
    else:
        axis = axis_of(dim, x.ndim)
    if x.ndim == 0 or x.size == 0:
        return jnp.zeros(out.shape, out.dtype)
    # two plain reductions: a reduction of (value, index) pairs is a scalar loop on the CPU
    x = x.astype(jnp.int8) if x.dtype == jnp.bool_ else x
    best = lax.expand_dims(extreme(x, (axis,), largest), [axis])
    place = lax.broadcasted_iota(jnp.int32 if x.shape[axis] < 2**31 else jnp.int64, x.shape, axis)
    past = lax.full_like(place, x.shape[axis] - 1)
    hit = (x == best) | (x != x) if jnp.issubdtype(x.dtype, jnp.floating) else x == best
    return _finish(out, extreme(lax.select(hit, place, past), (axis,), largest=False))


@lowers(aten.amax.default, aten.max.default)
def amax(out, x, dim=(), keepdim=False):
    return _extreme(out, x, dim, largest=True)


@lowers(aten.amin.default, aten.min.default)
def amin(out, x, dim=(), keepdim=False):
    return _extreme(out, x, dim, largest=False)


@lowers(aten.max.dim)
def max_dim(out, x, dim, keepdim=False):
    return _extreme(out[0], x, dim, True), _where_extreme(out[1], x, dim, True)


@lowers(aten.min.dim)
def min_dim(out, x, dim, keepdim=False):
    return _extreme(out[0], x, dim, False), _where_extreme(out[1], x, dim, False)


@lowers(aten.argmax.default)
def argmax(out, x, dim=None, keepdim=False):
    return _where_extreme(out, x, dim, True)


@lowers(aten.argmin.default)
def argmin(out, x, dim=None, keepdim=False):
    return _where_extreme(out, x, dim, False)


@lowers(aten.aminmax.default, aten._aminmax.default, aten._aminmax.dim)
def aminmax(out, x, dim=None, keepdim=False):
    return _extreme(out[0], x, dim, False), _extreme(out[1], x, dim, True)


def _moments(x, dim, correction):
    """Return mean and variance over dims, in the dtype eager accumulates in.

    The first element is subtracted from all: equal elements have no variance then, as in eager, and that of others does
    not depend on how far they are from zero.  On a mesh each device would wait for the one that has it.
    """
    axes = axes_of(dim, x.ndim)
    x = lax.convert_element_type(x, wide(x.dtype))
    count = count_of(x, axes)

    def mean_of(x):
        return sums.in_stages(x, axes) / jnp.asarray(count, x.dtype)

    def away_from(centre, x):
        return x - jnp.broadcast_to(keep(centre, axes), x.shape)

    mean = mean_of(x)
    if not on_mesh() and x.size:
        x = away_from(x[tuple([0 if d in axes else slice(None) for d in range(x.ndim)])], x)
    away = away_from(mean_of(x), x)
    square = away * away if jnp.isrealobj(x) else lax.real(away) ** 2 + lax.imag(away) ** 2
    free = jnp.maximum(jnp.asarray(count - (1 if correction is None else correction), square.dtype), 0)
    return mean, sums.in_stages(square, axes) / free


@lowers(aten.var.correction)
def var(out, x, dim=None, *, correction=None, keepdim=False):
    return _finish(out, _moments(x, dim, correction)[1])


@lowers(aten.std.correction)
def std(out, x, dim=None, *, correction=None, keepdim=False):
    return _finish(out, lax.sqrt(_moments(x, dim, correction)[1]))


@lowers(aten.var_mean.correction)
def var_mean(out, x, dim=None, *, correction=None, keepdim=False):
    mean, var = _moments(x, dim, correction)
    return _finish(out[0], var), _finish(out[1], mean)


@lowers(aten.std_mean.correction)
def std_mean(out, x, dim=None, *, correction=None, keepdim=False):
    mean, var = _moments(x, dim, correction)
    return _finish(out[0], lax.sqrt(var)), _finish(out[1], mean)


@lowers(aten.logsumexp.default)
def logsumexp(out, x, dim, keepdim=False):
    axes = axes_of(dim, x.ndim)
    x = lax.convert_element_type(x, wide(out.dtype))
    if x.size == 0:
        return _finish(out, lax.log(sums.in_stages(x, axes)))
    top = shift(lax.real(x) if jnp.iscomplexobj(x) else x, axes)
    top = jnp.where(jnp.abs(top) == jnp.inf, jnp.zeros((), top.dtype), top)
    total = sums.in_stages(lax.exp(x - jnp.broadcast_to(keep(top, axes), x.shape)), axes)
    return _finish(out, lax.log(total) + top)


@lowers(aten.cumsum.default)
def cumsum(out, x, dim, *, dtype=None):
    return _scan(out, lax.cumsum, x, dim)


@lowers(aten.cumprod.default)
def cumprod(out, x, dim, *, dtype=None):
    def product(x, axis):  # eager keeps products of float32 in float64: errors add up, and the first may overflow
        return lax.cumprod(x.astype(jnp.float64) if x.dtype == jnp.float32 else x, axis=axis)

    return _scan(out, product, x, dim)


def _scan(out, op, x, dim):
    if x.ndim == 0 or x.size == 0:
        return cast(x, out.dtype)
    kind = jnp.dtype(jnp.int32) if out.dtype == jnp.bool_ else wide(out.dtype)
    x = (x != 0).astype(kind) if out.dtype == jnp.bool_ else cast(x, kind)
    return lax.convert_element_type(op(x, axis=axis_of(dim, x.ndim)), out.dtype)


@lowers(aten.logcumsumexp.default, aten._logcumsumexp.default)
def logcumsumexp(out, x, dim):
    if x.ndim == 0 or x.size == 0:
        return x
    if jnp.isrealobj(x):  # rounded once, for exp, which the gradient takes of it, enlarges rounding errors
        return lax.cumlogsumexp(x.astype(jnp.float64), axis=axis_of(dim, x.ndim)).astype(out.dtype)

    def add(total, value):  # in order, for the phase adds up: it is not folded into one iteration
        low, high = (jnp.where(lax.real(total) < lax.real(value), *pair) for pair in ((total, value), (value, total)))
        below, top = lax.real(low - high), lax.real(high)
        sum_of = jnp.log1p(jnp.where(below == -jnp.inf, 0, lax.exp(low - high))) + high
        sum_of = jnp.where(lax.real(low) == jnp.inf, lax.log(exp(low) + exp(high)), sum_of)
        total = jnp.where(top == -jnp.inf, total, sum_of)
        total = jnp.where((low != low) | (high != high), jnp.complex128(complex(jnp.nan, jnp.nan)), total)
        return total, total

    x = cast(x, jnp.complex128)
    start = jnp.full_like(lax.index_in_dim(x, 0, axis_of(dim, x.ndim), keepdims=False), -jnp.inf)
    return cast(jnp.moveaxis(lax.scan(add, start, jnp.moveaxis(x, dim, 0))[1], 0, dim), out.dtype)


def _running(out, x, dim, op):
    """Return running extremes with the last place that reached them, as eager gives on ties and NaN."""
    if x.ndim == 0 or x.size == 0:
        return x, jnp.zeros(out[1].shape, out[1].dtype)
    axis = axis_of(dim, x.ndim)
    data = x.astype(jnp.int8) if x.dtype == jnp.bool_ else x
    best = op(data, axis=axis)
    reached = (data == best) | (data != data)
    place = lax.broadcasted_iota(out[1].dtype, x.shape, axis)
    return best.astype(x.dtype), lax.cummax(jnp.where(reached, place, 0), axis=axis)


@lowers(aten.cummax.default)
def cummax(out, x, dim):
    return _running(out, x, dim, lax.cummax)


@lowers(aten.cummin.default)
def cummin(out, x, dim):
    return _running(out, x, dim, lax.cummin)


@lowers(aten.trace.default)
def trace(out, x):
    return _finish(out, lax.reduce_sum(jnp.diagonal(x).astype(wide(out.dtype)), (0,)))


@lowers(aten.hash_tensor.default)
def hash_tensor(out, x, dim=(), *, keepdim=False, mode=0):
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    bits = lax.bitcast_convert_type(x.astype(jnp.float64), out.dtype) if floating else x.astype(out.dtype)
    return _finish(out, lax.reduce_xor(bits, axes_of(dim, x.ndim)))
