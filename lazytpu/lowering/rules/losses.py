"""Losses and their gradients."""

from functools import partial

import jax.numpy as jnp
import torch
from jax import lax

from lazytpu.lowering.registry import lowers
from lazytpu.lowering.support.operands import compute_dtype, operands, rounded, rounding

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


def _pointwise_loss(op, loss, dynamic="", exact=()):
    """Registers a loss of ``loss(r, x, target, *extra)`` an element.

    ``r`` rounds as the CPU does after each step in half precision, but for the dtypes that are ``exact``.  The op takes
    its extra argument after the reduction and may leave it out; torch's default is 1.
    """

    def rule(out, x, target, reduction=MEAN, *extra):
        extra = extra or (1.0,) * bool(dynamic)
        x, target, *extra = (jnp.asarray(t).astype(compute_dtype(out.dtype)) for t in (x, target, *extra))
        r = rounding(None if out.dtype in exact else out.dtype)
        return reduced(out, rounding(out.dtype)(loss(r, x, target, *map(r, extra))), reduction)

    lowers(op, dynamic=dynamic)(rule)


def _smooth_l1(r, x, target, beta):
    z = jnp.abs(r(x - target))
    return jnp.where(z < beta, r(r(0.5 * z) * z) / beta, z - r(0.5 * beta))


def _huber(r, x, target, delta):
    z = jnp.abs(r(x - target))
    return jnp.where(z <= delta, r(0.5 * z) * z, delta * r(z - r(0.5 * delta)))


_pointwise_loss(aten.mse_loss.default, lambda r, x, t: jnp.square(r(x - t)))
_pointwise_loss(aten.smooth_l1_loss.default, _smooth_l1, "beta", exact=(jnp.bfloat16,))
_pointwise_loss(aten.huber_loss.default, _huber, "delta", exact=(jnp.float16,))


def _share(factor, x, reduction):
    """``factor``, over the number of elements for a mean."""
    return jnp.asarray(factor / x.size if reduction == MEAN else factor, x.dtype)


@lowers(aten.mse_loss_backward.default)
def mse_loss_backward(out, grad, x, target, reduction):
    r, (grad, x, target) = rounding(out.dtype), operands(out, grad, x, target)
    return (r(r(_share(2, x, reduction)) * r(x - target)) * grad).astype(out.dtype)


@lowers(aten.smooth_l1_loss_backward.default, dynamic="beta")
def smooth_l1_loss_backward(out, grad, x, target, reduction, beta):
    x, target, beta = operands(out, x, target, beta, dtype=compute_dtype(out.dtype))
    d = x - target
    slope = jnp.where(d <= -beta, -1, jnp.where(d >= beta, 1, d / beta)).astype(x.dtype)
    return reduced_gradient(out, grad, slope, reduction)


@lowers(aten.huber_loss_backward.default, dynamic="delta")
def huber_loss_backward(out, grad, x, target, reduction, delta):
    r, (grad, x, target, delta) = rounding(out.dtype), operands(out, grad, x, target, delta)
    norm, d = r(_share(1, x, reduction)), r(x - target)
    outer = r(norm * delta) * grad
    slope = jnp.where(d <= -delta, -outer, jnp.where(d >= delta, outer, r(norm * d) * grad))
    return slope.astype(out.dtype)


def _soft_margin(x, target):
    """``x`` and ``target`` in the type to compute in, ``exp(-target * x)``, and the rounding after every step."""
    kept = jnp.promote_types(x.dtype, target.dtype)
    dtype = compute_dtype(kept)
    x, target = x.astype(dtype), target.astype(dtype)
    return target, rounded(jnp.exp(rounded(-target * x, kept)), kept), partial(rounded, dtype=kept)


@lowers(aten.soft_margin_loss.default)
def soft_margin_loss(out, x, target, reduction=MEAN):
    """The CPU's is made of several ops, so that in half precision it is infinite early."""
    _, z, step = _soft_margin(x, target)
    return reduced(out, step(jnp.log1p(z)), reduction)


@lowers(aten.soft_margin_loss_backward.default)
def soft_margin_loss_backward(out, grad, x, target, reduction):
    target, z, step = _soft_margin(x, target)
    norm = jnp.asarray(1 / max(x.size, 1) if reduction == MEAN else 1, z.dtype)
    slope = step(step(-norm * step(target * z)) / step(z + 1))
    return (slope * grad.astype(slope.dtype)).astype(out.dtype)


@lowers(aten.binary_cross_entropy.default)
def binary_cross_entropy(out, x, target, weight=None, reduction=MEAN):
    """Logarithms are clamped at -100, so that a wrong certainty costs 100 and not infinity."""
    x, target = x.astype(compute_dtype(x.dtype)), target.astype(compute_dtype(x.dtype))
    loss = (target - 1) * jnp.maximum(jnp.log1p(-x), -100) - target * jnp.maximum(jnp.log(x), -100)
    return reduced(out, loss if weight is None else loss * weight.astype(loss.dtype), reduction)


@lowers(aten.binary_cross_entropy_backward.default)
def binary_cross_entropy_backward(out, grad, x, target, weight=None, reduction=MEAN):
    x, target = x.astype(compute_dtype(x.dtype)), target.astype(compute_dtype(x.dtype))
    slope = (x - target) / jnp.maximum((1 - x) * x, 1e-12)
    return reduced_gradient(out, grad, slope if weight is None else slope * weight.astype(slope.dtype), reduction)


@lowers(aten.binary_cross_entropy_with_logits.default)
def binary_cross_entropy_with_logits(out, x, target, weight=None, pos_weight=None, reduction=MEAN):
    dtype = compute_dtype(out.dtype)
    x, target = x.astype(dtype), target.astype(dtype)
    r = rounding(out.dtype)
    positive = r(jnp.log1p(jnp.exp(-jnp.abs(x))) + jnp.maximum(-x, 0))
    if pos_weight is not None:
        positive = r(r(r(r(pos_weight.astype(dtype) - 1) * target) + 1) * positive)
    loss = r(r(r(1 - target) * x) + positive)
    return reduced(out, loss if weight is None else r(loss * weight.astype(dtype)), reduction)
