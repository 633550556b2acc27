"""Losses and their gradients."""

import jax.numpy as jnp
import torch
from jax import lax

from lazytpu.lowering.registry import lowers
from lazytpu.lowering.support import sums
from lazytpu.lowering.support.operands import compute_dtype, operands, rounded

aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2


def reduced(out, loss, reduction):
    """Return ``loss`` left alone, averaged or summed, rounded to the type of ``out``."""
    if reduction == MEAN:
        loss = sums.in_stages(loss) / loss.size
    elif reduction == SUM:
        loss = sums.in_stages(loss)
    return loss.astype(out.dtype)


def reduced_gradient(out, grad, slope, reduction):
    """Return the gradient of ``reduced``: ``grad * slope``, over the number of elements for a mean."""
    slope = jnp.broadcast_to(slope, out.shape)
    grad = grad.astype(slope.dtype)
    return ((grad / slope.size if reduction == MEAN else grad) * slope).astype(out.dtype)


def _picked(target, weight, ignore_index, classes, dtype):
    """Return the target with ignored entries made 0, and the weight of each entry (0 where ignored)."""
    kept = target != ignore_index
    index = jnp.where(kept, target, 0)
    w = jnp.ones((), dtype) if weight is None else weight.astype(dtype)[index]
    return index, jnp.where(kept, w, jnp.zeros((), dtype))


@lowers(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss_forward(out, x, target, weight, reduction, ignore_index):
    """Return ``-sum(w[t] * x[t]) / sum(w[t])`` over the class dimension: 0 of [C], else 1."""
    loss_type, total_type = out
    dtype = compute_dtype(x.dtype)
    dim = min(1, x.ndim - 1)
    target = target.reshape(()) if x.ndim == 1 else target
    index, w = _picked(target, weight, ignore_index, x.shape[dim], dtype)
    at = jnp.squeeze(jnp.take_along_axis(x, jnp.expand_dims(index, dim), dim, mode="clip"), dim).astype(dtype)
    loss = jnp.where(w == 0, 0, -w * at)
    if reduction == NONE and x.ndim > 1:
        return loss.reshape(loss_type.shape).astype(loss_type.dtype), jnp.zeros(total_type.shape, total_type.dtype)
    loss, total = sums.in_stages(loss), sums.in_stages(w)
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


def _pointwise_loss(op, loss, dynamic=""):
    """Register a loss of ``loss(x, target, *extra)`` an element.

    The op takes its extra argument after the reduction and may leave it out; torch's default is 1.
    """

    def rule(out, x, target, reduction=MEAN, *extra):
        extra = extra or (1.0,) * bool(dynamic)
        dtype = compute_dtype(out.dtype)
        return reduced(out, loss(*(jnp.asarray(t).astype(dtype) for t in (x, target, *extra))), reduction)

    lowers(op, dynamic=dynamic)(rule)


def _smooth_l1(x, target, beta):
    z = jnp.abs(x - target)
    return jnp.where(z < beta, 0.5 * z * z / beta, z - 0.5 * beta)


def _huber(x, target, delta):
    z = jnp.abs(x - target)
    return jnp.where(z <= delta, 0.5 * z * z, delta * (z - 0.5 * delta))


_pointwise_loss(aten.mse_loss.default, lambda x, target: jnp.square(x - target))
_pointwise_loss(aten.smooth_l1_loss.default, _smooth_l1, "beta")
_pointwise_loss(aten.huber_loss.default, _huber, "delta")


def _pointwise_loss_gradient(op, slope, dynamic=""):
    """Register the gradient of a loss whose derivative by ``x`` is ``slope(x, target, *extra)``."""

    def rule(out, grad, x, target, reduction, *extra):
        x, target, *extra = operands(out, x, target, *extra, dtype=compute_dtype(out.dtype))
        return reduced_gradient(out, grad, slope(x, target, *extra), reduction)

    lowers(op, dynamic=dynamic)(rule)


def _smooth_l1_slope(x, target, beta):
    d = x - target
    return jnp.where(d <= -beta, -1, jnp.where(d >= beta, 1, d / beta)).astype(x.dtype)


_pointwise_loss_gradient(aten.mse_loss_backward.default, lambda x, target: 2 * (x - target))
_pointwise_loss_gradient(aten.smooth_l1_loss_backward.default, _smooth_l1_slope, "beta")
_pointwise_loss_gradient(
    aten.huber_loss_backward.default, lambda x, target, delta: jnp.clip(x - target, -delta, delta), "delta"
)


def _soft_margin(x, target):
    """Return ``target`` in the type to compute in and ``exp(-target * x)``, infinite as early as on the CPU."""
    kept = jnp.promote_types(x.dtype, target.dtype)
    x, target = x.astype(compute_dtype(kept)), target.astype(compute_dtype(kept))
    return target, rounded(jnp.exp(-target * x), kept)


@lowers(aten.soft_margin_loss.default)
def soft_margin_loss(out, x, target, reduction=MEAN):
    return reduced(out, jnp.log1p(_soft_margin(x, target)[1]), reduction)


@lowers(aten.soft_margin_loss_backward.default)
def soft_margin_loss_backward(out, grad, x, target, reduction):
    target, z = _soft_margin(x, target)
    return reduced_gradient(out, grad, -target * z / (z + 1), reduction)


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
    positive = jnp.log1p(jnp.exp(-jnp.abs(x))) + jnp.maximum(-x, 0)
    if pos_weight is not None:
        positive = ((pos_weight.astype(dtype) - 1) * target + 1) * positive
    loss = (1 - target) * x + positive
    return reduced(out, loss if weight is None else loss * weight.astype(dtype), reduction)
