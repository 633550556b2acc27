"""Fake quantization: values rounded to a quantized grid and kept as floats, with the gradients torch defines.

A value is ``round(x / scale) + zero_point``, cut to the range of the grid; its gradient passes where nothing was cut.
"""

import jax.numpy as jnp
import torch
from jax import lax

from lazytpu.lowering.registry import lowers

aten = torch.ops.aten


def _rounded(x):
    """Return the nearest whole number, the even one of two."""
    return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN)


def _snap(x, scale, zero_point, low, high):
    """Return ``x`` on the grid, as float32 or float64, and where it lay inside the range."""
    wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    scale = jnp.asarray(scale).astype(jnp.float32)
    zero_point = jnp.asarray(zero_point)
    steps = x.astype(wide) * (1 / scale).astype(wide)
    if jnp.issubdtype(zero_point.dtype, jnp.inexact):  # it need not be whole, then the sum is rounded
        zero_point = zero_point.astype(wide)
        steps = _rounded(steps + zero_point)
    else:
        zero_point = zero_point.astype(wide)
        steps = _rounded(steps) + zero_point
    inside = (steps >= low) & (steps <= high)
    # fmax and fmin: NaN becomes the lowest value.
    steps = jnp.where(jnp.isnan(steps), low, jnp.clip(steps, low, high))
    return (steps - zero_point) * scale.astype(wide), inside


def _along(parameter, axis, ndim):
    """Return a parameter of one value a channel, in the shape that broadcasts along ``axis``."""
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
    """Return a learnable zero point, which is a float, as the integer it stands for."""
    return jnp.clip(_rounded(zero_point), low, high)


@lowers(aten._fake_quantize_learnable_per_tensor_affine.default)
def learnable_per_tensor(out, x, scale, zero_point, quant_min, quant_max, grad_factor=1.0):
    zero_point = _whole(zero_point.reshape(()), quant_min, quant_max)
    return _snap(x, scale.reshape(()), zero_point, quant_min, quant_max)[0].astype(x.dtype)


@lowers(aten._fake_quantize_learnable_per_channel_affine.default)
def learnable_per_channel(out, x, scale, zero_point, axis, quant_min, quant_max, grad_factor=1.0):
    zero_point = _along(_whole(zero_point, quant_min, quant_max), axis, x.ndim)
    return _snap(x, _along(scale, axis, x.ndim), zero_point, quant_min, quant_max)[0].astype(x.dtype)


def _learnable_gradients(grad, x, scale, zero_point, low, high, factor):
    """Return the gradients of each element: of the input, the scale and the zero point."""
    if x.dtype != jnp.float64:
        grad, x, scale, zero_point = (a.astype(jnp.float32) for a in (grad, x, scale, zero_point))
    steps = _rounded(x * (1 / scale) + zero_point)
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
    return dx.astype(out[0].dtype), *(
        jnp.sum(d).reshape(t.shape).astype(t.dtype) for d, t in zip((ds, dz), out[1:], strict=True)
    )


@lowers(aten._fake_quantize_learnable_per_channel_affine_backward.default)
def learnable_per_channel_backward(out, grad, x, scale, zero_point, axis, quant_min, quant_max, grad_factor=1.0):
    whole = _along(_whole(zero_point, quant_min, quant_max), axis, x.ndim)
    scale = _along(scale, axis, x.ndim)
    dx, ds, dz = _learnable_gradients(grad, x, scale, whole, quant_min, quant_max, grad_factor)
    others = tuple(d for d in range(x.ndim) if d != axis % x.ndim)
    return dx.astype(out[0].dtype), *(
        jnp.sum(d, others).astype(t.dtype) for d, t in zip((ds, dz), out[1:], strict=True)
    )


# Smaller scales lose too much precision in float32 kernels; torch cuts them off here.
_SMALLEST_SCALE = 6.1e-5


def _choose_parameters(least, most, low, high, symmetric):
    """Return the scale and zero point whose grid covers ``least`` to ``most`` and holds zero exactly."""
    least, most = least.astype(jnp.float32), most.astype(jnp.float32)
    balanced = (least < 0) & (most > 0) & symmetric
    half = (high - low) // 2
    reach = jnp.maximum(jnp.abs(least / -(half + 1)), jnp.abs(most / half)).astype(jnp.float64)
    least = jnp.minimum(jnp.where(balanced, (reach * -(half + 1)).astype(jnp.float32), least), 0)
    most = jnp.maximum(jnp.where(balanced, (reach * half).astype(jnp.float32), most), 0)

    scale = ((most.astype(jnp.float64) - least) / (high - low)).astype(jnp.float32)
    scale = jnp.where((scale == 0) | jnp.isinf(1 / scale), jnp.float32(0.1), scale)
    small = jnp.float32(_SMALLEST_SCALE)
    tiny = scale < small
    stretched = least * (small / scale), most * (small / scale)
    least, most = (
        jnp.where(tiny, jnp.where(least == 0, 0, jnp.where(most == 0, -small * (high - low), stretched[0])), least),
        jnp.where(tiny, jnp.where(least == 0, small * (high - low), jnp.where(most == 0, 0, stretched[1])), most),
    )
    scale = jnp.where(tiny, small, scale)

    below, above = least / scale.astype(jnp.float64), most / scale.astype(jnp.float64)
    from_least = abs(low) - jnp.abs(below) < abs(high) - jnp.abs(above)
    zero_point = jnp.where(from_least, low - below, high - above)
    zero_point = jnp.where((least < 0) & (most > 0) & symmetric, (low + high) / 2, zero_point)
    zero_point = _rounded(jnp.clip(zero_point, low, high))
    return scale, zero_point.astype(jnp.int32)


@lowers(aten._fused_moving_avg_obs_fq_helper_functional.default, dynamic="averaging_const")
def fused_moving_average_observer(
    out,
    x,
    observer_on,
    fake_quant_on,
    running_min,
    running_max,
    scale,
    zero_point,
    averaging_const,
    quant_min,
    quant_max,
    ch_axis,
    per_row_fake_quant=False,
    symmetric_quant=False,
):
    observe, quantize = observer_on.reshape(()) != 0, fake_quant_on.reshape(()) != 0
    axes = tuple(d for d in range(x.ndim) if d != ch_axis % x.ndim) if per_row_fake_quant else tuple(range(x.ndim))
    rate = jnp.asarray(averaging_const).astype(running_min.dtype)

    def moved(running, seen):
        seen = seen.reshape(running.shape).astype(running.dtype)
        average = jnp.where(jnp.isinf(running), seen, running + rate * (seen - running))
        return jnp.where(observe, average, running)

    running_min = moved(running_min, jnp.min(x, axes))
    running_max = moved(running_max, jnp.max(x, axes))
    chosen = _choose_parameters(running_min, running_max, quant_min, quant_max, symmetric_quant)
    scale = jnp.where(quantize, chosen[0].reshape(scale.shape).astype(scale.dtype), scale)
    zero_point = jnp.where(quantize, chosen[1].reshape(zero_point.shape).astype(zero_point.dtype), zero_point)
    if per_row_fake_quant:
        y, mask = _snap(x, _along(scale, ch_axis, x.ndim), _along(zero_point, ch_axis, x.ndim), quant_min, quant_max)
    else:
        y, mask = _snap(x, scale.reshape(-1)[0], zero_point.reshape(-1)[0], quant_min, quant_max)
    y = jnp.where(quantize, y.astype(x.dtype), x)
    return y, mask | ~quantize, running_min, running_max, scale, zero_point
