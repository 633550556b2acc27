"""Windows of an image laid out as columns (im2col), and their sum back into an image."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from lazytpu.lowering.registry import lowers
from lazytpu.lowering.support.operands import compute_dtype

aten = torch.ops.aten


def _columns(x, kernel, dilation, padding, stride):
    """Return [..., channel, height, width] to [..., channel * window, places]."""
    *lead, channels, height, width = x.shape
    pads = [(0, 0, 0)] * (len(lead) + 1) + [(p, p, 0) for p in padding]
    x = lax.pad(x, jnp.zeros((), x.dtype), pads)
    counts = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, p, d, k, s in zip((height, width), padding, dilation, kernel, stride, strict=True)
    ]
    taps = []
    for tap in np.ndindex(*kernel):
        part = x
        for axis, (i, d, n, s) in enumerate(zip(tap, dilation, counts, stride, strict=True), x.ndim - 2):
            part = lax.slice_in_dim(part, i * d, i * d + (n - 1) * s + 1, s, axis)
        taps.append(part)
    return jnp.stack(taps, len(lead) + 1).reshape(*lead, channels * len(taps), int(np.prod(counts)))


@lowers(aten.im2col.default)
def im2col(out, x, kernel_size, dilation, padding, stride):
    return _columns(x, kernel_size, dilation, padding, stride)


@lowers(aten.col2im.default)
def col2im(out, x, output_size, kernel_size, dilation, padding, stride):
    image = jax.ShapeDtypeStruct(out.shape, compute_dtype(out.dtype))
    fold = jax.linear_transpose(lambda image: _columns(image, kernel_size, dilation, padding, stride), image)
    return fold(x.astype(image.dtype))[0].astype(out.dtype)
