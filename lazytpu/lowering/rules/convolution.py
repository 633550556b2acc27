"""Convolutions and their gradients, plain, transposed, grouped and dilated, in one to three dimensions.

Three linear maps are enough: the convolution, its transpose in the input and its transpose in the
weight.  A transposed convolution is the second of them, and its gradients are the other two.
"""

import math

import jax
import jax.numpy as jnp
import torch
from jax import lax

from lazytpu.lowering.registry import forced, lowers, on_one_cpu, target_platform
from lazytpu.lowering.support import conv_groups, conv_matmul, conv_narrow, conv_patches, conv_taps, sums
from lazytpu.lowering.support.operands import compute_dtype

aten = torch.ops.aten
_FEW_ROWS, _FEW_CHANNELS = 64, 8  # of a product on CPUs, below which our own lowering is faster


def _xla_conv(x, w, shape, stride, padding, dilation, groups):
    """Return the convolution whose result has ``shape``: the padding at the end of a dimension follows from that.

    Of images, XLA on CPUs is several times as fast if the channels are last.
    """
    spans = [(o - 1) * s + (k - 1) * d + 1 for o, s, k, d in zip(shape[2:], stride, w.shape[2:], dilation, strict=True)]
    pads = [(p, span - size - p) for p, span, size in zip(padding, spans, x.shape[2:], strict=True)]
    how = {"window_strides": stride, "padding": pads, "rhs_dilation": dilation, "feature_group_count": groups}
    if x.ndim != 4 or not on_one_cpu():
        return lax.conv_general_dilated(x, w, **how)
    x, w = jnp.moveaxis(x, 1, -1), jnp.transpose(w, (2, 3, 1, 0))
    return jnp.moveaxis(lax.conv_general_dilated(x, w, **how, dimension_numbers=("NHWC", "HWIO", "NHWC")), -1, 1)


def _own_lowering(x=None, w=None, groups=1, contracted=1):
    """Return whether our convolution is faster than XLA's on the platform (benchmarks/conv_lowerings.py).

    On CPUs XLA's convolutions of f32 are as good along one dimension where the channels are neither few nor very many,
    and better along two, except for few channels and for more weights than places.

    Args:
        x: what is convolved [image, channel, *spatial]; none where only the platform is asked for.
        w: the weight's shape.
        contracted: the dimension of the weight that is summed over; 2 for the gradient of the weight.
    """
    how = forced("own_convolution", "xla_convolution")
    if not how and x is not None and not jnp.issubdtype(x.dtype, jnp.inexact):
        return True  # GPUs have none of integers
    if how or not on_one_cpu():
        return how == "own_convolution"
    if x is None or groups > 1 or x.dtype != jnp.float32 or x.ndim > 4:
        return True
    if x.ndim == 3:
        return not 8 <= x.shape[1] < 512
    taps = math.prod(w[2:])
    if contracted < 2 and (w[contracted] * taps < _FEW_ROWS or w[1 - contracted] < _FEW_CHANNELS):
        return True
    return x.size // x.shape[1] < w[1] * taps


def _ungrouped(*how):
    """Return the module that lowers, and its arguments: groups are left out where there is only one."""
    return (conv_matmul, how[:-1]) if how[-1] == 1 else (conv_groups, how)


def _of_patches(kernel, stride, padding, dilation, groups):
    """Return whether the windows do not overlap, where ours is chosen on the platform: one product is the best then."""
    return groups == 1 and _own_lowering() and conv_patches.takes(kernel, stride, padding, dilation)


def _conv(x, w, shape, *how):
    if _of_patches(w.shape[2:], *how):
        return conv_patches.forward(x, w, shape[2:], how[0])
    if _own_lowering(x, w.shape, how[-1], 1):
        module, how = _ungrouped(*how)
        return module.forward(x, w, shape[2:], *how)
    return _xla_conv(x, w, shape, *how)


def _input_transpose(grad, w, shape, *how):
    if _of_patches(w.shape[2:], *how):
        return conv_patches.input_gradient(grad, w, shape[2:], how[0])
    if _own_lowering(grad, w.shape, how[-1], 0):
        module, how = _ungrouped(*how)
        return module.input_gradient(grad, w, shape[2:], *how)
    x = jax.ShapeDtypeStruct(shape, grad.dtype)
    return jax.linear_transpose(lambda x: _xla_conv(x, w, grad.shape, *how), x)(grad)[0]


def _weight_transpose(grad, x, shape, *how):
    if _of_patches(shape[2:], *how):
        return conv_patches.weight_gradient(grad, x, shape[2:], how[0])
    if _own_lowering(x, shape, how[-1], 2):
        module, how = _ungrouped(*how)
        return module.weight_gradient(grad, x, shape[2:], *how)
    if target_platform() == "tpu" and conv_taps.takes(x, shape[2:], how[-1]):
        return conv_taps.weight_gradient(grad, x, shape[2:], *how[:-1])
    w = jax.ShapeDtypeStruct(shape, grad.dtype)
    return jax.linear_transpose(lambda w: _xla_conv(x, w, grad.shape, *how), w)(grad)[0]


def _weight_gradient(grad, x, shape, rounded_to, how):
    """Return the transpose, or as the CPU's plain kernel has it, rounded to a type after each element of the batch."""

    def of(grad, x):
        return _weight_transpose(grad, x, shape, *how)

    return of(grad, x) if rounded_to is None else conv_narrow.summed_by_element(of, (grad, x), shape, rounded_to)


def _computed(*arrays):
    """Return the arrays in the type to compute in: CPUs have no half-precision convolution worth the name."""
    if target_platform() != "cpu":
        return arrays
    return tuple(a.astype(compute_dtype(a.dtype)) for a in arrays)


def _plain_kernel(dtype, *sizes):
    return _own_lowering() and conv_narrow.takes_plain_kernel(dtype, *sizes)


def _sizes(values, n):
    """Return a list of ``n`` integers: torch allows one for all dimensions."""
    return tuple(values) * n if len(values) == 1 else tuple(values)


def _add_bias(y, bias):
    return y if bias is None else y + bias.astype(y.dtype).reshape(-1, *[1] * (y.ndim - 2))


@lowers(aten.convolution.default, aten.convolution_overrideable.default)
def convolution(out, x, w, bias, stride, padding, dilation, transposed, output_padding, groups):
    n = x.ndim - 2
    how = _sizes(stride, n), _sizes(padding, n), _sizes(dilation, n), groups
    x, w = _computed(x, w)
    if 0 in out.shape or 0 in x.shape or 0 in w.shape:
        y = jnp.zeros(out.shape, x.dtype)
    elif transposed and _plain_kernel(out.dtype, how[0], _sizes(output_padding, n)):
        y = conv_narrow.transposed(x, w, out.shape, out.dtype, *how)
    elif transposed:
        y = _input_transpose(x, w, out.shape, *how)
    else:
        y = _conv(x, w, out.shape, *how)
    return _add_bias(y, bias).astype(out.dtype)


@lowers(aten.convolution_backward.default)
def convolution_backward(
    out, grad, x, w, bias_sizes, stride, padding, dilation, transposed, output_padding, groups, output_mask
):
    n = x.ndim - 2
    how = _sizes(stride, n), _sizes(padding, n), _sizes(dilation, n), groups
    grad, x, w = _computed(grad, x, w)
    empty = 0 in grad.shape or 0 in x.shape or 0 in w.shape
    dx = dw = db = None
    if output_mask[0]:
        if empty:
            dx = jnp.zeros(x.shape, x.dtype)
        elif transposed:
            dx = _conv(grad, w, x.shape, *how)
        elif _plain_kernel(out[0].dtype, how[0], _sizes(output_padding, n)):
            dx = conv_narrow.transposed(grad, w, x.shape, out[0].dtype, *how)
        else:
            dx = _input_transpose(grad, w, x.shape, *how)
        dx = dx.astype(out[0].dtype)
    if output_mask[1]:
        if empty:
            dw = jnp.zeros(w.shape, w.dtype)
        else:
            of_plain = _plain_kernel(out[1].dtype, how[0], _sizes(output_padding, n))
            pair = (x, grad) if transposed else (grad, x)
            dw = _weight_gradient(*pair, w.shape, out[1].dtype if of_plain else None, how)
        dw = dw.astype(out[1].dtype)
    if output_mask[2]:
        db = sums.total(grad.astype(compute_dtype(grad.dtype)), (0, *range(2, grad.ndim))).astype(out[2].dtype)
    return dx, dw, db


@lowers(aten.convolution_backward_overrideable.default)
def convolution_backward_overrideable(out, grad, x, w, *how_and_mask):
    return convolution_backward(out, grad, x, w, None, *how_and_mask)


@lowers(aten.conv_tbc.default)
def conv_tbc(out, x, w, bias, pad=0):
    """Time, batch, channel; the kernel is [time, in, out]."""
    image = jax.ShapeDtypeStruct((out.shape[1], out.shape[2], out.shape[0]), out.dtype)
    x, w = jnp.transpose(x, (1, 2, 0)), jnp.transpose(w, (2, 1, 0))
    y = convolution(image, x, w, bias, (1,), (pad,), (1,), False, (0,), 1)
    return jnp.transpose(y, (2, 0, 1))
