"""Softmax, log-softmax, their masked variants and gradients, computed in float32 for half precision."""

import jax.numpy as jnp
import torch

from lazytpu.lowering.registry import lowers
from lazytpu.lowering.support.maxima import shift
from lazytpu.lowering.support.operands import compute_dtype

aten = torch.ops.aten


def _sum(x, dim):
    """Return the sum along ``dim``, which stays as a dimension of size one."""
    return jnp.sum(x, dim, keepdims=True) if x.ndim else x


def _shifted(x, dim, dtype):
    """Return ``x - max(x)`` along ``dim`` in ``dtype``."""
    x = x.astype(dtype if x.size else jnp.float32)  # the CPU takes any dtype where there is nothing to compute
    return x - shift(x, dim, keepdims=True) if x.ndim else x - x


@lowers(aten._softmax.default)
def softmax(out, x, dim, half_to_float=False):
    e = jnp.exp(_shifted(x, dim, compute_dtype(out.dtype)))
    return (e / _sum(e, dim)).astype(out.dtype)


@lowers(aten._log_softmax.default)
def log_softmax(out, x, dim, half_to_float=False):
    y = _shifted(x, dim, compute_dtype(out.dtype))
    return (y - jnp.log(_sum(jnp.exp(y), dim))).astype(out.dtype)


@lowers(aten._safe_softmax.default)
def safe_softmax(out, x, dim, dtype=None):
    """Softmax in which a row of nothing but -inf gives zeros."""
    y = softmax(out, x.astype(out.dtype), dim)
    return jnp.where(jnp.all(x == -jnp.inf, dim, keepdims=bool(x.ndim)), jnp.zeros((), y.dtype), y)


@lowers(aten._softmax_backward_data.default)
def softmax_backward(out, grad, y, dim, input_dtype):
    dtype = compute_dtype(grad.dtype)
    grad, y = grad.astype(dtype), y.astype(dtype)
    gy = grad * y
    return (gy - y * _sum(gy, dim)).astype(out.dtype)


@lowers(aten._log_softmax_backward_data.default)
def log_softmax_backward(out, grad, y, dim, input_dtype):
    dtype = compute_dtype(grad.dtype)
    grad = grad.astype(dtype)
    return (grad - jnp.exp(y.astype(dtype)) * _sum(grad, dim)).astype(out.dtype)


def _full_mask(x, mask, mask_type):
    """Return the mask (true: left out) over ``x`` of [batch, heads, query, key]; type 0 is [L, L], 1 is [batch, L]."""
    if mask_type == 1 and mask.ndim == 2 and x.ndim == 4:
        mask = mask[:, None, None, :]
    return jnp.broadcast_to(mask, x.shape)


@lowers(aten._masked_softmax.default)
def masked_softmax(out, x, mask, dim=None, mask_type=None):
    """Return the softmax over the entries whose mask is false; a row without any gives zeros."""
    dim = x.ndim - 1 if dim is None else dim
    hidden = _full_mask(x, mask, mask_type)
    y = _shifted(jnp.where(hidden, -jnp.inf, x.astype(compute_dtype(x.dtype))), dim, compute_dtype(x.dtype))
    e = jnp.where(hidden, 0, jnp.exp(y))
    total = _sum(e, dim)
    return jnp.where(total == 0, 0, e / jnp.where(total == 0, 1, total)).astype(out.dtype)


@lowers(aten._masked_softmax_backward.default)
def masked_softmax_backward(out, grad, y, mask, dim=None):
    dim = grad.ndim - 1 if dim is None else dim
    hidden = jnp.broadcast_to(mask, grad.shape)
    dtype = compute_dtype(grad.dtype)
    gy = jnp.where(hidden, 0, grad.astype(dtype) * y.astype(dtype))
    return jnp.where(hidden, 0, gy - y.astype(dtype) * _sum(gy, dim)).astype(out.dtype)
