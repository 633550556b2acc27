"""Norms and distances."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from lazytpu.lowering.registry import lowers
from lazytpu.lowering.rules.indexing import read, write
from lazytpu.lowering.rules.reductions import axes_of, keep, wide
from lazytpu.lowering.support import sums

aten = torch.ops.aten


def _powers(x, axes, p):
    return sums.in_stages(x**p, axes) ** (1 / p)


def norm_of(x, p, axes):
    """Return the p-norm of ``x`` over ``axes``, real, in the dtype eager accumulates in; ``p`` may be a 0-d array."""
    x = lax.convert_element_type(x, wide(x.dtype))
    x = jnp.abs(x)
    norms = {
        math.inf: lambda: jnp.max(x, axes, initial=0),
        -math.inf: lambda: jnp.min(x, axes, initial=math.inf),
        0: lambda: lax.reduce_sum((x != 0).astype(x.dtype), axes),
        1: lambda: sums.in_stages(x, axes),
        2: lambda: lax.sqrt(sums.in_stages(x * x, axes)),
    }
    if isinstance(p, int | float):
        return norms[p]() if p in norms else _powers(x, axes, jnp.asarray(p, x.dtype))
    case = sum(jnp.where(p == known, i - len(norms), 0) for i, known in enumerate(norms)) + len(norms)
    branches = [*norms.values(), lambda: _powers(x, axes, p.astype(x.dtype))]
    return lax.switch(case, branches)


def _rounded(out, x):
    return lax.reshape(lax.convert_element_type(x, out.dtype), out.shape)


@lowers(aten.linalg_vector_norm.default)
def linalg_vector_norm(out, x, ord=2, dim=None, keepdim=False, *, dtype=None):
    if dtype is not None:
        x = lax.convert_element_type(x, jnp.result_type(x.dtype, out.dtype) if jnp.iscomplexobj(x) else out.dtype)
    return _rounded(out, norm_of(x, ord, axes_of(dim, x.ndim)))


@lowers(
    aten.norm.Scalar,
    aten.norm.ScalarOpt_dim,
    aten.norm.ScalarOpt_dim_dtype,
    aten.norm.ScalarOpt_dtype,
    aten.native_norm.default,
    aten.native_norm.ScalarOpt_dim_dtype,
)
def norm(out, x, p=2, dim=None, keepdim=False, dtype=None):
    return linalg_vector_norm(out, x, 2 if p is None else p, dim, keepdim, dtype=dtype)


@lowers(aten.dist.default)
def dist(out, x, y, p=2):
    away = x - y
    return _rounded(out, norm_of(away, p, axes_of(None, away.ndim)))


@lowers(aten.renorm.default, dynamic="maxnorm")
def renorm(out, x, p, dim, maxnorm):
    axes = tuple(d for d in range(x.ndim) if d != dim % x.ndim)
    norms = keep(norm_of(x, p, axes), axes)
    maxnorm = jnp.asarray(maxnorm).astype(norms.dtype)
    scale = jnp.where(norms > maxnorm, maxnorm / (norms + jnp.asarray(1e-7, norms.dtype)), 1)
    return (x * scale.astype(x.dtype)).astype(out.dtype)


@lowers(aten._euclidean_dist.default)
def euclidean_dist(out, x, y):
    xx, yy = (jnp.sum(a * a, -1, keepdims=True) for a in (x, y))
    square = xx + jnp.swapaxes(yy, -1, -2) - 2 * (x @ jnp.swapaxes(y, -1, -2))
    return lax.sqrt(jnp.maximum(square, jnp.zeros((), square.dtype)))


@lowers(aten._cdist_forward.default)
def cdist_forward(out, x, y, p, compute_mode):
    if 0 in out.shape or x.shape[-1] == 0:
        return jnp.zeros(out.shape, out.dtype)
    many = x.shape[-2] > 25 or y.shape[-2] > 25
    if p == 2 and (compute_mode == 1 or (not compute_mode and many)):
        return jnp.broadcast_to(euclidean_dist(out, x, y), out.shape)
    away = x[..., :, None, :] - y[..., None, :, :]
    return _rounded(out, norm_of(away, p, (away.ndim - 1,)))


def _slope(away, distance, p, grad):
    """Return the gradient of a p-distance with respect to the difference ``away``; 0 where the distance is 0."""
    size, sign = jnp.abs(away), jnp.sign(away)
    if p == 0:
        return jnp.zeros_like(away)
    if p == 1:
        return grad * sign
    if p == math.inf:
        return grad * sign * (size == distance)
    safe = jnp.where(distance == 0, jnp.ones((), away.dtype), distance)
    ratio = jnp.where(size == 0, jnp.zeros((), away.dtype), (size / safe) ** (p - 1))
    return jnp.where(distance == 0, jnp.zeros((), away.dtype), grad * sign * ratio)


@lowers(aten._cdist_backward.default)
def cdist_backward(out, grad, x, y, p, distance):
    if 0 in out.shape or grad.size == 0:
        return jnp.zeros(out.shape, out.dtype)
    away = x[..., :, None, :] - y[..., None, :, :]
    slope = _slope(away, distance[..., None], p, grad[..., None])
    return _rounded(out, lax.reduce_sum(slope, (slope.ndim - 2,)))


def _pairs(x):
    """Return row numbers of all pairs i < j, in order."""
    return (jnp.asarray(i) for i in np.triu_indices(x.shape[0], 1))


@lowers(aten._pdist_forward.default)
def pdist_forward(out, x, p=2.0):
    if 0 in out.shape or x.size == 0:
        return jnp.zeros(out.shape, out.dtype)
    i, j = _pairs(x)
    return _rounded(out, norm_of(read(x, [0], [i]) - read(x, [0], [j]), p, (1,)))


@lowers(aten._pdist_backward.default)
def pdist_backward(out, grad, x, p, distance):
    zeros = jnp.zeros(out.shape, out.dtype)
    if x.size == 0 or grad.size == 0:
        return zeros
    i, j = _pairs(x)
    slope = _slope(read(x, [0], [i]) - read(x, [0], [j]), distance[:, None], p, grad[:, None])
    return write(write(zeros, [0], [i], slope, "sum"), [0], [j], -slope, "sum")
