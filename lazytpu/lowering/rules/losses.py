"""Losses and their gradients."""

import jax.numpy as jnp
import torch
from jax import lax

from lazytpu.lowering.registry import lowers
from lazytpu.lowering.rules.operands import compute_dtype

aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2


def reduced(out, loss, reduction):
    """``loss`` left alone, averaged or summed, rounded to the type of ``out``."""
    if reduction == MEAN:
        loss = jnp.mean(loss)
    elif reduction == SUM:
        loss = jnp.sum(loss)
    return loss.astype(out.dtype)


def reduced_gradient(out, grad, slope, reduction):
    """Gradient of ``reduced``: ``grad * slope``, over the number of elements for a mean."""
    slope = jnp.broadcast_to(slope, out.shape)
    grad = grad.astype(slope.dtype)
    return ((grad / slope.size if reduction == MEAN else grad) * slope).astype(out.dtype)


def _picked(target, weight, ignore_index, classes, dtype):
    """The target with ignored entries made 0, and the weight of each entry (0 where ignored)."""
    kept = target != ignore_index
    index = jnp.where(kept, target, 0)
    w = jnp.ones((), dtype) if weight is None else weight.astype(dtype)[index]
    return index, jnp.where(kept, w, jnp.zeros((), dtype))


@lowers(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss_forward(out, x, target, weight, reduction, ignore_index):
    """``-sum(w[t] * x[t]) / sum(w[t])`` over the class dimension: 0 of [C], else 1."""
    loss_type, total_type = out
    dtype = compute_dtype(x.dtype)
    dim = min(1, x.ndim - 1)
    target = target.reshape(()) if x.ndim == 1 else target
    index, w = _picked(target, weight, ignore_index, x.shape[dim], dtype)
    at = jnp.squeeze(jnp.take_along_axis(x, jnp.expand_dims(index, dim), dim, mode="clip"), dim).astype(dtype)
    loss = jnp.where(w == 0, 0, -w * at)
    if reduction == NONE and x.ndim > 1:
        return loss.reshape(loss_type.shape).astype(loss_type.dtype), jnp.zeros(total_type.shape, total_type.dtype)
    loss, total = jnp.sum(loss), jnp.sum(w)
    loss = loss / total if reduction == MEAN else loss
    return loss.reshape(loss_type.shape).astype(loss_type.dtype), total.astype(total_type.dtype)


@lowers(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def nll_loss_backward(out, grad, x, target, weight, reduction, ignore_index, total):
    dtype = compute_dtype(x.dtype)
    dim = min(1, x.ndim - 1)
    target = target.reshape(()) if x.ndim == 1 else target
    index, w = _picked(target, weight, ignore_index, x.shape[dim], dtype)
    grad = grad.astype(dtype)
    grad = grad / total.astype(dtype) if reduction == MEAN else grad
    value = jnp.where(w == 0, 0, -w * grad.reshape(w.shape if reduction == NONE else ()))
    classes = lax.broadcasted_iota(index.dtype, x.shape, dim)
    here = classes == jnp.expand_dims(index, dim)
    return jnp.where(here, jnp.expand_dims(value, dim), 0).astype(out.dtype)


@lowers(aten.mse_loss.default)
def mse_loss(out, x, target, reduction=MEAN):
    d = x.astype(compute_dtype(out.dtype)) - target.astype(compute_dtype(out.dtype))
    return reduced(out, d * d, reduction)


@lowers(aten.mse_loss_backward.default)
def mse_loss_backward(out, grad, x, target, reduction):
    d = x.astype(compute_dtype(out.dtype)) - target.astype(compute_dtype(out.dtype))
    return reduced_gradient(out, grad, 2 * d, reduction)
