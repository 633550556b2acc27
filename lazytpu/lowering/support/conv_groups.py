"""Grouped convolutions on CPUs, where XLA's are up to a thousand times slower than matrix products.

With one channel a group there is nothing to multiply as matrices: each tap is scaled and added.  Other
groups are convolutions of their own, one after the other.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lazytpu.lowering.support import conv_matmul
from lazytpu.lowering.support.conv_matmul import _framed, _loop, _offsets


def _split(x, groups, axis):
    """Return the groups of ``axis`` as a new first dimension."""
    return jnp.moveaxis(x.reshape(*x.shape[:axis], groups, x.shape[axis] // groups, *x.shape[axis + 1 :]), axis, 0)


def _joined(x, axis):
    """Return the inverse of ``_split``."""
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])


def _each_tap(x, sizes, stride, offsets):
    """Return the taps of ``x`` [image, channel, *spatial], each of spatial ``sizes``."""
    for tap in itertools.product(*offsets):
        limit = (*x.shape[:2], *(t + (n - 1) * s + 1 for t, n, s in zip(tap, sizes, stride, strict=True)))
        yield lax.slice(x, (0, 0, *tap), limit, (1, 1, *stride))


def _depthwise(x, w, sizes, stride, offsets):
    """``w`` is [channel, multiple, tap]; the result [image, channel * multiple, *sizes]."""
    x, offsets = _framed(x, sizes, stride, offsets)
    w = w.reshape(*w.shape, *[1] * len(sizes))
    y = sum(tap[:, :, None] * w[:, :, t] for t, tap in enumerate(_each_tap(x, sizes, stride, offsets)))
    return y.reshape(len(x), -1, *sizes)


def _taps_last(w, channels):
    return w.reshape(channels, -1, int(np.prod(w.shape[2:])))


def forward(x, w, sizes, stride, padding, dilation, groups):
    if w.shape[1] == 1:
        return _depthwise(x, _taps_last(w, groups), sizes, stride, _offsets(w.shape[2:], padding, dilation))
    how = sizes, stride, padding, dilation
    y = lax.map(lambda xw: conv_matmul.forward(*xw, *how), (_split(x, groups, 1), _split(w, groups, 0)))
    return _joined(y, 1)


def input_gradient(grad, w, spatial, stride, padding, dilation, groups):
    if w.shape[1] != 1:
        how = spatial, stride, padding, dilation
        y = lax.map(lambda gw: conv_matmul.input_gradient(*gw, *how), (_split(grad, groups, 1), _split(w, groups, 0)))
        return _joined(y, 1)
    offsets = _offsets(w.shape[2:], padding, dilation)
    if all(s == 1 for s in stride) and grad.shape[1] == groups:
        back = [[-o for o in offset] for offset in offsets]
        return _depthwise(grad, _taps_last(w, groups), spatial, stride, back)
    x = jax.ShapeDtypeStruct((len(grad), groups, *spatial), grad.dtype)
    spread = jax.linear_transpose(lambda x: _depthwise(x, _taps_last(w, groups), grad.shape[2:], stride, offsets), x)
    return spread(grad)[0]


def weight_gradient(grad, x, kernel, stride, padding, dilation, groups):
    if x.shape[1] != groups:
        how = kernel, stride, padding, dilation
        w = lax.map(lambda gx: conv_matmul.weight_gradient(*gx, *how), (_split(grad, groups, 1), _split(x, groups, 1)))
        return _joined(w, 0)
    images, sizes = len(x), grad.shape[2:]
    framed, offsets = _framed(x, sizes, stride, _offsets(kernel, padding, dilation))
    grad = grad.reshape(images, groups, -1, *sizes)
    dims = (0, *range(3, grad.ndim))
    # A loop, so that XLA writes the frame once and does not pad again at every tap.
    iterations = next((c for c in (2, 3, 5, 7) if images % c == 0), 1)
    count = images // iterations

    def body(i, total):
        part, of_part = (lax.dynamic_slice_in_dim(a, i * count, count, 0) for a in (framed, grad))
        taps = _each_tap(part, sizes, stride, offsets)
        return total + jnp.stack([jnp.sum(tap[:, :, None] * of_part, dims) for tap in taps], -1)

    total = _loop(iterations, body, jnp.zeros((groups, grad.shape[2], int(np.prod(kernel))), x.dtype))
    return total.reshape(-1, 1, *kernel)
