"""Activation functions and their gradients."""

from __future__ import annotations

import math

import torch
from jax import lax
from jax import numpy as jnp

from lazytpu.lowering.registry import lowers, lowers_each
from lazytpu.lowering.rules.operands import cast, operands, pointwise

aten = torch.ops.aten


def _relu(x):
    return lax.max(x, lax.full_like(x, 0))


def _silu_grad(grad, x):
    s = lax.logistic(x)
    return grad * s * (1 + x * (1 - s))


lowers_each(
    {
        aten.relu.default: pointwise(_relu),
        aten.sigmoid.default: pointwise(lax.logistic),
        aten.tanh.default: pointwise(lax.tanh),
        aten.silu.default: pointwise(lambda x: x * lax.logistic(x)),
        aten.sigmoid_backward.default: pointwise(lambda grad, y: grad * (y * (1 - y)).conj()),
        aten.tanh_backward.default: pointwise(lambda grad, y: grad * (1 - y * y).conj()),
        aten.silu_backward.default: pointwise(_silu_grad),
    }
)


@lowers(aten.threshold_backward.default)
def threshold_backward(out, grad, x, threshold):
    grad, x, threshold = operands(out, grad, x, threshold)
    return cast(jnp.where(x <= threshold, jnp.zeros_like(grad), grad), out.dtype)


@lowers(aten.gelu.default)
def gelu(out, x, *, approximate="none"):
    (x,) = operands(out, x)
    if approximate == "tanh":
        y = 0.5 * x * (1 + lax.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
    else:
        y = x * 0.5 * (1 + lax.erf(x * math.sqrt(0.5)))
    return cast(y, out.dtype)


@lowers(aten.gelu_backward.default)
def gelu_backward(out, grad, x, *, approximate="none"):
    grad, x = operands(out, grad, x)
    if approximate == "tanh":
        scale = math.sqrt(2 / math.pi)
        t = lax.tanh(scale * (x + 0.044715 * x * x * x))
        slope = 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * scale * (1 + 3 * 0.044715 * x * x)
    else:
        density = lax.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
        slope = 0.5 * (1 + lax.erf(x * math.sqrt(0.5))) + x * density
    return cast(grad * slope, out.dtype)
