"""Multi-class and multi-label margin losses, whose terms compare every class with the target ones."""

import jax.numpy as jnp
import torch

from lazytpu.lowering.registry import lowers
from lazytpu.lowering.rules.losses import MEAN, NONE, reduced
from lazytpu.lowering.support.operands import compute_dtype

aten = torch.ops.aten


def _per_row(grad, rows, reduction):
    """Return the gradient of each row's loss, as a column."""
    grad = jnp.broadcast_to(grad.reshape(-1) if reduction == NONE else grad.reshape(()), (rows,))
    return (grad / rows if reduction == MEAN else grad)[:, None]


def _multi_margin_terms(x, target, p, margin, weight):
    """Return rows of x, the margin each class violates (0 for the target), the row's weight, the target's place."""
    x = jnp.atleast_2d(x.astype(compute_dtype(x.dtype)))
    target = target.reshape(-1, 1)
    is_target = jnp.arange(x.shape[1]) == target
    at = jnp.take_along_axis(x, target, 1, mode="clip")
    z = jnp.where(is_target, 0, jnp.maximum(jnp.asarray(margin, x.dtype) - at + x, 0))
    scale = jnp.asarray(1 / x.shape[1], x.dtype)
    return z, scale if weight is None else scale * weight.astype(x.dtype)[target], is_target


@lowers(aten.multi_margin_loss.default)
def multi_margin_loss(out, x, target, p=1, margin=1, weight=None, reduction=MEAN):
    z, scale, _ = _multi_margin_terms(x, target, p, margin, weight)
    loss = jnp.sum(jnp.where(jnp.asarray(p) == 1, z, z * z) * scale, 1)
    return reduced(out, loss, reduction).reshape(out.shape)


@lowers(aten.multi_margin_loss_backward.default)
def multi_margin_loss_backward(out, grad, x, target, p, margin, weight=None, reduction=MEAN):
    z, scale, is_target = _multi_margin_terms(x, target, p, margin, weight)
    slope = jnp.where(z > 0, jnp.where(jnp.asarray(p) == 1, 1, 2 * z), 0) * scale
    slope = jnp.where(is_target, -jnp.sum(slope, 1, keepdims=True), slope)
    return (_per_row(grad.astype(z.dtype), len(z), reduction) * slope).reshape(out.shape).astype(out.dtype)


def _label_pairs(x, target):
    """Return violations [row, label, class], the labels before the first -1, and which classes are labels."""
    x, target = jnp.atleast_2d(x.astype(compute_dtype(x.dtype))), jnp.atleast_2d(target)
    valid = jnp.cumprod(target >= 0, 1, dtype=jnp.int32) != 0
    chosen = (target[:, :, None] == jnp.arange(x.shape[1])) & valid[:, :, None]
    is_target = jnp.any(chosen, 1)
    at = jnp.take_along_axis(x, jnp.maximum(target, 0), 1, mode="clip")
    z = jnp.maximum(1 - at[:, :, None] + x[:, None, :], 0)
    return jnp.where(valid[:, :, None] & ~is_target[:, None, :], z, 0), chosen, is_target


@lowers(aten.multilabel_margin_loss_forward.default)
def multilabel_margin_loss(out, x, target, reduction):
    z, _, is_target = _label_pairs(x, target)
    loss = reduced(out[0], jnp.sum(z, (1, 2)) / z.shape[2], reduction)
    return loss.reshape(out[0].shape), is_target.reshape(out[1].shape).astype(out[1].dtype)


@lowers(aten.multilabel_margin_loss_backward.default)
def multilabel_margin_loss_backward(out, grad, x, target, reduction, is_target):
    z, chosen, _ = _label_pairs(x, target)
    broken = (z > 0).astype(z.dtype)
    slope = jnp.sum(broken, 1) - jnp.sum(jnp.where(chosen, jnp.sum(broken, 2, keepdims=True), 0), 1)
    grad = _per_row(grad.astype(z.dtype), len(z), reduction)
    return (grad * slope / z.shape[2]).reshape(out.shape).astype(out.dtype)
