"""Activation functions and their gradients."""

from __future__ import annotations

import math

import jax.numpy as jnp
import torch
from jax import lax

from lazytpu.lowering.registry import lowers, lowers_each
from lazytpu.lowering.support import complex_functions
from lazytpu.lowering.support.operands import cast, compute_dtype, operand, operands, pointwise, quotient

aten = torch.ops.aten

_SQRT_HALF = math.sqrt(0.5)
_TANH_SCALE, _TANH_CUBIC = math.sqrt(2 / math.pi), 0.044715  # Hendrycks and Gimpel, arXiv:1606.08415


def _relu(x):
    return lax.max(x, lax.full_like(x, 0))


def _where(condition, x, y):
    """Return ``x`` where the condition holds, else ``y``; either may be a number."""
    x, y = (a if hasattr(a, "dtype") else lax.full_like(b, a) for a, b in ((x, y), (y, x)))
    return lax.select(condition, x, y)


def _conj(x):
    return lax.conj(x) if jnp.iscomplexobj(x) else x


def _silu_grad(grad, x):
    s = lax.logistic(x)
    return grad * _conj(s * (1 + x * (1 - s)))


def _softplus(x):
    """Return log(1 + e^x)."""
    return _relu(x) + lax.log1p(lax.exp(-lax.abs(x)))


def _mish_grad(grad, x):
    t = lax.tanh(_softplus(x))
    return grad * (t + x * lax.logistic(x) * (1 - t * t))


def _inside(x, low, high):
    return (x >= low) & (x <= high)


def _shrink_grad(grad, x, width):
    return _where((x < -width) | (x > width), grad, 0)


def _softshrink(x, width):
    """Towards zero by ``width``."""
    return _where(x > width, x - width, _where(x < -width, x + width, _where(x != x, x, 0)))


def _hardswish_grad(grad, x):
    return _where(x <= -3, 0, _where(x >= 3, grad, grad * (quotient(x, lax.full_like(x, 3)) + 0.5)))


lowers_each(
    {
        aten.relu.default: pointwise(_relu),
        aten.sigmoid.default: pointwise(complex_functions.sigmoid),
        aten.tanh.default: pointwise(complex_functions.tanh),
        aten.silu.default: pointwise(lambda x: x * lax.logistic(x)),
        aten.mish.default: pointwise(lambda x: x * lax.tanh(_softplus(x))),
        aten.hardsigmoid.default: pointwise(lambda x: lax.clamp(cast(0, x.dtype), x + 3, cast(6, x.dtype)) / 6),
        aten.hardswish.default: pointwise(lambda x: x * lax.clamp(cast(0, x.dtype), x + 3, cast(6, x.dtype)) / 6),
        aten.sigmoid_backward.default: pointwise(lambda grad, y: grad * _conj((1 - y) * y)),
        aten.tanh_backward.default: pointwise(lambda grad, y: grad * _conj(1 - y * y)),
        aten.silu_backward.default: pointwise(_silu_grad),
        aten.mish_backward.default: pointwise(_mish_grad),
        aten.hardsigmoid_backward.default: pointwise(lambda g, x: _where((x > -3) & (x < 3), g / 6, 0)),
        aten.hardswish_backward.default: pointwise(_hardswish_grad),
        aten.threshold.default: pointwise(lambda x, limit, value: _where(x <= limit, value, x)),
        aten.hardtanh_backward.default: pointwise(lambda g, x, low, high: _where((x > low) & (x < high), g, 0)),
        aten.hardshrink_backward.default: pointwise(_shrink_grad),
        aten.softshrink_backward.default: pointwise(_shrink_grad),
        aten._prelu_kernel.default: pointwise(lambda x, slope: _where(x > 0, x, slope * x)),
    }
)
lowers(aten.threshold_backward.default, dynamic="threshold")(pointwise(lambda g, x, limit: _where(x <= limit, 0, g)))


def _exact(out, *xs):
    """Return operands of which numbers are not made halves before float32 is computed in."""
    return operands(out, *xs, dtype=compute_dtype(out.dtype))


@lowers(aten.hardtanh.default)
def hardtanh(out, x, min_val=-1, max_val=1):
    x, low, high = operands(out, x, min_val, max_val)
    return cast(lax.min(lax.max(x, low), high), out.dtype)


@lowers(aten.hardshrink.default)
def hardshrink(out, x, lambd=0.5):
    x, width = operands(out, x, lambd)
    return cast(_where(_inside(x, -width, width), 0, x), out.dtype)


@lowers(aten.softshrink.default, dynamic="lambd")
def softshrink(out, x, lambd=0.5):
    return cast(_softshrink(*_exact(out, x, lambd)), out.dtype)


@lowers(aten.leaky_relu.default)
def leaky_relu(out, x, negative_slope=0.01):
    x, slope = _exact(out, x, negative_slope)
    return cast(_where(x > 0, x, x * slope), out.dtype)


@lowers(aten.leaky_relu_backward.default)
def leaky_relu_backward(out, grad, x, negative_slope, self_is_result):
    grad, x, slope = _exact(out, grad, x, negative_slope)
    return cast(_where(x > 0, grad, grad * slope), out.dtype)


@lowers(aten._prelu_kernel_backward.default)
def prelu_backward(out, grad, x, weight):
    grad, x, weight = operands(out[0], grad, x, weight)
    return cast(_where(x > 0, grad, weight * grad), out[0].dtype), cast(_where(x > 0, 0, x * grad), out[1].dtype)


@lowers(aten.rrelu_with_noise_backward.default)
def rrelu_with_noise_backward(out, grad, x, noise, lower, upper, training, self_is_result):
    grad, x, noise, lower, upper = _exact(out, grad, x, noise, lower, upper)
    fixed = _where(x > 0, grad, grad * ((lower + upper) / 2))
    return cast(_where(upper - lower > 1e-6, grad * noise, fixed) if training else fixed, out.dtype)


@lowers(aten.elu.default)
def elu(out, x, alpha=1, scale=1, input_scale=1):
    x, alpha, scale, input_scale = _exact(out, x, alpha, scale, input_scale)
    return cast(scale * _where(x < 0, alpha * lax.expm1(x * input_scale), x), out.dtype)


@lowers(aten.celu.default, dynamic="alpha")
def celu(out, x, alpha=1.0):
    x, alpha = _exact(out, x, alpha)
    return cast(_where(x < 0, alpha * lax.expm1(x / alpha), x), out.dtype)


@lowers(aten.elu_backward.default)
def elu_backward(out, grad, alpha, scale, input_scale, is_result, x):
    grad, alpha, scale, input_scale, x = _exact(out, grad, alpha, scale, input_scale, x)
    slope = x + alpha * scale if is_result else alpha * scale * lax.exp(x * input_scale)
    return cast(grad * _where(x > 0, scale, input_scale * slope), out.dtype)


@lowers(aten.softplus.default)
def softplus(out, x, beta=1, threshold=20):
    x, beta, threshold = _exact(out, x, beta, threshold)
    return cast(_where(x * beta > threshold, x, _softplus(x * beta) / beta), out.dtype)


@lowers(aten.softplus_backward.default)
def softplus_backward(out, grad, x, beta, threshold):
    grad, x, beta, threshold = _exact(out, grad, x, beta, threshold)
    return cast(_where(x * beta > threshold, grad, grad * lax.logistic(x * beta)), out.dtype)


@lowers(aten.log_sigmoid_forward.default)
def log_sigmoid_forward(out, x):
    x = operand(x, out[0])
    small = lax.exp(-lax.abs(x))
    # the buffer is a saved exp(-|x|) or, where torch predicts none, empty; the gradient needs no such help
    buffer = cast(small, out[1].dtype) if out[1].shape == x.shape else lax.full(out[1].shape, 0, out[1].dtype)
    return cast(lax.min(x, lax.full_like(x, 0)) - lax.log1p(small), out[0].dtype), buffer


@lowers(aten.log_sigmoid_backward.default)
def log_sigmoid_backward(out, grad, x, buffer):
    grad, x = operands(out, grad, x)
    small = lax.exp(-lax.abs(x))
    slope = small / (1 + small)
    return cast(grad * _where(x < 0, 1 - slope, slope), out.dtype)


def _gelu_share(x):
    """Return ``(1 + tanh(u)) / 2`` for the u of the approximation, which does not cancel where that is near 0."""
    return lax.logistic(2 * _TANH_SCALE * (x + _TANH_CUBIC * x * x * x))


@lowers(aten.gelu.default)
def gelu(out, x, *, approximate="none"):
    x = operand(x, out)
    share = _gelu_share(x) if approximate == "tanh" else 0.5 * (1 + lax.erf(x * _SQRT_HALF))
    return cast(x * share, out.dtype)


@lowers(aten.gelu_backward.default)
def gelu_backward(out, grad, x, *, approximate="none"):
    grad, x = operands(out, grad, x)
    if approximate == "tanh":
        s = _gelu_share(x)
        slope = s + x * s * (1 - s) * (2 * _TANH_SCALE * (1 + 3 * _TANH_CUBIC * x * x))
    else:
        density = lax.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
        slope = 0.5 * (1 + lax.erf(x * _SQRT_HALF)) + x * density
    return cast(grad * slope, out.dtype)


def _halves(x, dim):
    """Return the two halves of ``x`` along ``dim``, in the dtype eager computes in."""
    size = x.shape[dim] // 2
    x = cast(x, compute_dtype(x.dtype))
    return (lax.slice_in_dim(x, start, start + size, axis=dim) for start in (0, size))


@lowers(aten.glu.default)
def glu(out, x, dim=-1):
    a, b = _halves(x, dim)
    return cast(a * lax.logistic(b), out.dtype)


@lowers(aten.glu_backward.default)
def glu_backward(out, grad, x, dim):
    a, b = _halves(x, dim)
    s = lax.logistic(b)
    grad = cast(grad, s.dtype)
    parts = [grad * s, (1 - s) * s * a * grad]
    return cast(lax.concatenate(parts, dim % x.ndim), out.dtype)


@lowers(aten.glu_jvp.default)
def glu_jvp(out, y, x, dx, dim):
    _, b = _halves(x, dim)
    da, db = _halves(dx, dim)
    s = lax.logistic(b)
    return cast(da * s + cast(y, s.dtype) * (1 - s) * db, out.dtype)
