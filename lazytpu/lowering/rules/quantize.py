"""Fake quantization: values rounded to a quantized grid and kept as floats, with the gradients torch defines.

A value is ``round(x / scale) + zero_point``, cut to the range of the grid; its gradient passes where nothing was cut.
"""

import jax.numpy as jnp
import torch
from jax import lax

from lazytpu.lowering.registry import lowers

aten = torch.ops.aten


def _snap(x, scale, zero_point, low, high):
    """``x`` on the grid, as float32 or float64, and where it lay inside the range."""
    wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    scale = jnp.asarray(scale).astype(jnp.float32)
    zero_point = jnp.asarray(zero_point).astype(wide)
    steps = lax.round(x.astype(wide) * (1 / scale).astype(wide), lax.RoundingMethod.TO_NEAREST_EVEN) + zero_point
    inside = (steps >= low) & (steps <= high)
    # fmax and fmin: NaN becomes the lowest value.
    steps = jnp.where(jnp.isnan(steps), low, jnp.clip(steps, low, high))
    return (steps - zero_point) * scale.astype(wide), inside


def _along(parameter, axis, ndim):
    """A parameter of one value a channel, in the shape that broadcasts along ``axis``."""
    return parameter.reshape([-1 if d == axis % ndim else 1 for d in range(ndim)])


@lowers(aten.fake_quantize_per_tensor_affine_cachemask.default, dynamic="scale zero_point")
def fake_quantize_per_tensor(out, x, scale, zero_point, quant_min, quant_max):
    y, mask = _snap(x, scale, zero_point, quant_min, quant_max)
    return y.astype(x.dtype), mask


@lowers(aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default)
def fake_quantize_per_tensor_with_parameters(out, x, scale, zero_point, enabled, quant_min, quant_max):
    y, mask = _snap(x, scale.reshape(()), zero_point.reshape(()), quant_min, quant_max)
    on = enabled.reshape(()) != 0
    return jnp.where(on, y.astype(x.dtype), x), mask | ~on


@lowers(aten.fake_quantize_per_channel_affine_cachemask.default)
def fake_quantize_per_channel(out, x, scale, zero_point, axis, quant_min, quant_max):
    scale, zero_point = (_along(p, axis, x.ndim) for p in (scale, zero_point))
    y, mask = _snap(x, scale, zero_point, quant_min, quant_max)
    return y.astype(x.dtype), mask


def _whole(zero_point, low, high):
    """A learnable zero point, which is a float, as the integer it stands for."""
    return jnp.clip(lax.round(zero_point, lax.RoundingMethod.TO_NEAREST_EVEN), low, high)


@lowers(aten._fake_quantize_learnable_per_tensor_affine.default)
def learnable_per_tensor(out, x, scale, zero_point, quant_min, quant_max, grad_factor=1.0):
    zero_point = _whole(zero_point.reshape(()), quant_min, quant_max)
    return _snap(x, scale.reshape(()), zero_point, quant_min, quant_max)[0].astype(x.dtype)


@lowers(aten._fake_quantize_learnable_per_channel_affine.default)
def learnable_per_channel(out, x, scale, zero_point, axis, quant_min, quant_max, grad_factor=1.0):
    zero_point = _along(_whole(zero_point, quant_min, quant_max), axis, x.ndim)
    return _snap(x, _along(scale, axis, x.ndim), zero_point, quant_min, quant_max)[0].astype(x.dtype)


def _learnable_gradients(grad, x, scale, zero_point, low, high, factor):
    """Gradients of each element: of the input, the scale and the zero point."""
    steps = lax.round(x * (1 / scale) + zero_point, lax.RoundingMethod.TO_NEAREST_EVEN)
    inside = (steps >= low) & (steps <= high)
    cut = jnp.clip(steps, low, high)
    snapped = (cut - zero_point) * scale
    of_scale = jnp.where(inside, grad * (snapped - x) / scale, grad * (cut - zero_point)) * factor
    of_zero_point = jnp.where(inside, 0, -grad * scale) * factor
    return jnp.where(inside, grad, 0), of_scale, of_zero_point


@lowers(aten._fake_quantize_learnable_per_tensor_affine_backward.default)
def learnable_per_tensor_backward(out, grad, x, scale, zero_point, quant_min, quant_max, grad_factor=1.0):
    whole = _whole(zero_point.reshape(()), quant_min, quant_max)
    dx, ds, dz = _learnable_gradients(grad, x, scale.reshape(()), whole, quant_min, quant_max, grad_factor)
    return dx.astype(x.dtype), *(
        jnp.sum(d).reshape(t.shape).astype(t.dtype) for d, t in zip((ds, dz), out[1:], strict=True)
    )


@lowers(aten._fake_quantize_learnable_per_channel_affine_backward.default)
def learnable_per_channel_backward(out, grad, x, scale, zero_point, axis, quant_min, quant_max, grad_factor=1.0):
    whole = _along(_whole(zero_point, quant_min, quant_max), axis, x.ndim)
    scale = _along(scale, axis, x.ndim)
    dx, ds, dz = _learnable_gradients(grad, x, scale, whole, quant_min, quant_max, grad_factor)
    others = tuple(d for d in range(x.ndim) if d != axis % x.ndim)
    return dx.astype(x.dtype), *(jnp.sum(d, others).astype(t.dtype) for d, t in zip((ds, dz), out[1:], strict=True))
