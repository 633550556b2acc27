"""The ops of graphs that ``torch.ao`` quantizes, ``quantized_decomposed``, that have to look at values in eager torch.

The others are compositions of aten ops, which are recorded.
"""

import jax.numpy as jnp
from jax import lax

from lazytpu.lowering.registry import lowers
from lazytpu.lowering.rules.quantize import _rounded as to_nearest_even
from lazytpu.lowering.support.operands import cast, quotient, result_dtype, rounded

_PER_TENSOR = ("default", "tensor", "tensor2")
_F32 = jnp.float32


def _number(x, dtype):
    """Return a tensor of one element, or a number, as a 0-d array."""
    return lax.convert_element_type(jnp.asarray(x).reshape(()), dtype)


@lowers(
    *(f"quantized_decomposed.quantize_per_tensor.{kind}" for kind in _PER_TENSOR),
    dynamic="scale zero_point quant_min quant_max",
)
def quantize_per_tensor(out, x, scale, zero_point, quant_min, quant_max, dtype):
    inverse = (1 / _number(scale, jnp.float64)).astype(_F32)
    steps = to_nearest_even(x.astype(_F32) * inverse) + _number(zero_point, _F32)
    return cast(jnp.clip(steps, _number(quant_min, _F32), _number(quant_max, _F32)), out.dtype)


@lowers(
    *(f"quantized_decomposed.dequantize_per_tensor.{kind}" for kind in _PER_TENSOR),
    dynamic="scale zero_point quant_min quant_max",
)
def dequantize_per_tensor(out, x, scale, zero_point, quant_min, quant_max, dtype, *, out_dtype=None):
    steps = x.astype(out.dtype).astype(_F32) - _number(zero_point, _F32)
    return (rounded(steps, out.dtype) * _number(scale, _F32)).astype(out.dtype)


@lowers("quantized_decomposed.choose_qparams.tensor", dynamic="eps quant_min quant_max")
def choose_parameters(out, x, quant_min, quant_max, eps, dtype):
    least, most = jnp.minimum(jnp.min(x), 0), jnp.maximum(jnp.max(x), 0)
    span = rounded(most.astype(_F32) - least.astype(_F32), x.dtype)
    scale = rounded(quotient(span, jnp.asarray(quant_max - quant_min, _F32)), x.dtype)
    scale = jnp.maximum(scale, jnp.asarray(eps, _F32))
    zero_point = quant_min - to_nearest_even(quotient(least.astype(_F32), scale)).astype(jnp.int64)
    zero_point = jnp.clip(zero_point, quant_min, quant_max)
    return scale.reshape(1).astype(jnp.float64), zero_point.reshape(1).astype(jnp.int64)


@lowers("quantized_decomposed.choose_qparams_symmetric.tensor", dynamic="eps quant_min quant_max")
def choose_symmetric_parameters(out, x, quant_min, quant_max, eps, dtype):
    most = jnp.max(jnp.abs(x))
    scale = rounded(quotient(most.astype(_F32), jnp.asarray((quant_max - quant_min) / 2, _F32)), x.dtype)
    scale = jnp.maximum(scale, jnp.asarray(eps, _F32))
    zero_point = 128 if str(dtype) == "torch.uint8" else 0
    return scale.reshape(1).astype(jnp.float64), jnp.full(1, zero_point, jnp.int64)


@lowers("quantized_decomposed.quantize_per_channel_group.default", dynamic="quant_min quant_max")
def quantize_per_channel_group(out, x, scales, zero_points, quant_min, quant_max, dtype, group_size=128):
    size = x.shape[-1] if group_size > x.shape[-1] and scales.shape[-1] == 1 else group_size
    groups = x.reshape(-1, size)
    wide = result_dtype(groups, scales.reshape(-1, 1))
    steps = groups.astype(wide) * quotient(jnp.ones_like(scales), scales).reshape(-1, 1).astype(
        wide
    ) + zero_points.reshape(-1, 1).astype(wide)
    return cast(jnp.clip(to_nearest_even(steps), quant_min, quant_max), out.dtype).reshape(out.shape)
