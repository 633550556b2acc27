"""Torchvision's deformable convolution: each tap reads where an offset says, between the pixels."""

import jax
import jax.numpy as jnp
from jax import lax

from lazytpu.lowering.registry import lowers
from lazytpu.lowering.support.operands import compute_dtype


def _sample(planes, y, x):
    """Return ``planes`` [H,W,C] at points y, x (of any shape), bilinear, zero outside."""
    height, width = planes.shape[:2]
    y0, x0 = jnp.floor(y), jnp.floor(x)
    total = 0
    for dy in (0, 1):
        for dx in (0, 1):
            at_y, at_x = y0 + dy, x0 + dx
            inside = (at_y >= 0) & (at_y < height) & (at_x >= 0) & (at_x < width)
            weight = (1 - jnp.abs(y - at_y)) * (1 - jnp.abs(x - at_x))
            # A point far outside would weigh its corners by more than one; none of them is inside then.
            at = jnp.where(inside, at_y, 0).astype(jnp.int64), jnp.where(inside, at_x, 0).astype(jnp.int64)
            total += planes[at] * jnp.where(inside, weight, 0)[..., None]
    return total


def _convolved(x, weight, offset, mask, bias, stride, padding, dilation, groups, offset_groups, use_mask):
    n, channels, height, width = x.shape
    out_channels, _, kernel_height, kernel_width = weight.shape
    out_height, out_width = offset.shape[2:]
    taps = kernel_height * kernel_width
    planes = x.reshape(n, offset_groups, channels // offset_groups, height, width).transpose(0, 1, 3, 4, 2)
    offset = offset.reshape(n, offset_groups, taps, 2, out_height, out_width)
    tap_y, tap_x = (a.reshape(taps, 1, 1) for a in jnp.mgrid[:kernel_height, :kernel_width])
    base_y = (jnp.arange(out_height) * stride[0] - padding[0])[:, None] + tap_y * dilation[0]
    base_x = jnp.arange(out_width) * stride[1] - padding[1] + tap_x * dilation[1]
    y = offset[:, :, :, 0] + base_y.astype(x.dtype)
    x_ = offset[:, :, :, 1] + base_x.astype(x.dtype)
    columns = jax.vmap(jax.vmap(_sample))(planes, y, x_)  # [n, offset group, tap, out y, out x, channel]
    if use_mask:
        columns *= mask.reshape(n, offset_groups, taps, out_height, out_width)[..., None]
    columns = columns.transpose(0, 1, 5, 2, 3, 4).reshape(n, groups, channels // groups * taps, out_height * out_width)
    weight = weight.reshape(groups, out_channels // groups, channels // groups * taps)
    out = jnp.einsum("gok,ngkp->ngop", weight, columns).reshape(n, out_channels, out_height, out_width)
    return out + bias[:, None, None]


def _with_attributes(stride_h, stride_w, pad_h, pad_w, dilation_h, dilation_w, groups, offset_groups, use_mask):
    def convolved(x, weight, offset, mask, bias):
        pairs = (stride_h, stride_w), (pad_h, pad_w), (dilation_h, dilation_w)
        return _convolved(x, weight, offset, mask, bias, *pairs, groups, offset_groups, use_mask)

    return convolved


@lowers("torchvision.deform_conv2d.default")
def deform_conv2d(out, x, weight, offset, mask, bias, *attributes):
    if 0 in out.shape:
        return jnp.zeros(out.shape, out.dtype)
    wide = compute_dtype(x.dtype)
    tensors = (lax.convert_element_type(a, wide) for a in (x, weight, offset, mask, bias))
    return _with_attributes(*attributes)(*tensors).astype(out.dtype)


@lowers("torchvision._deform_conv2d_backward.default")
def deform_conv2d_backward(out, grad, x, weight, offset, mask, bias, *attributes):
    if grad.size == 0:
        return tuple(jnp.zeros(t.shape, t.dtype) for t in out)
    wide = compute_dtype(x.dtype)
    tensors = (lax.convert_element_type(a, wide) for a in (x, weight, offset, mask, bias))
    grads = jax.vjp(_with_attributes(*attributes), *tensors)[1](lax.convert_element_type(grad, wide))
    return tuple(g.astype(t.dtype) for g, t in zip(grads, out, strict=True))
