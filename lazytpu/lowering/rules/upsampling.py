"""Interpolation: nearest, linear, cubic and their antialiased forms, with gradients.

Every mode is separable: along a dimension each result is a weighted sum of a few elements, whose places
and weights are known while lowering.  The gradient is the product with the transposed weights.
"""

import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from lazytpu.lowering.registry import lowers
from lazytpu.lowering.support.operands import compute_dtype
from lazytpu.lowering.support.upsampling_bytes import resample_bytes

aten = torch.ops.aten

MOST_TAPS = 4  # with more elements a result than this, a product with the dense weights is cheaper


def _scale(length, size, align_corners, scale, dtype):
    """Return the distance in the input between neighbouring results."""
    if align_corners:
        return dtype((length - 1) / (size - 1)) if size > 1 else dtype(0)
    return dtype(1 / scale) if scale is not None and scale > 0 else dtype(dtype(length) / dtype(size))


def _sources(length, size, align_corners, scale, dtype):
    """Return the place in the input of each result's centre."""
    step, i = _scale(length, size, align_corners, scale, dtype), np.arange(size, dtype=dtype)
    return step * i if align_corners else step * (i + dtype(0.5)) - dtype(0.5)


def _nearest(length, size, align_corners, scale, dtype, offset=0.0):
    step = _scale(length, size, False, scale, np.float32)
    at = np.floor((np.arange(size, dtype=np.float32) + np.float32(offset)) * step)
    return np.minimum(at.astype(np.int64), length - 1)[:, None], None


def _nearest_exact(*how):
    return _nearest(*how, offset=0.5)


def _linear(length, size, align_corners, scale, dtype):
    source = np.maximum(_sources(length, size, align_corners, scale, dtype), 0)
    low = np.minimum(np.floor(source.astype(np.float32)).astype(np.int64), length - 1)
    high = np.minimum(low + 1, length - 1)
    part = np.clip(source - low, 0, 1).astype(dtype)
    return np.stack([low, high], 1), np.stack([1 - part, part], 1)


def cubic(t, a):
    """Return the cubic convolution kernel (Keys, 1981) with parameter ``a``, for ``t >= 0``; arrays of numpy or jax."""
    near = ((a + 2) * t - (a + 3)) * t * t + 1
    far = ((a * t - 5 * a) * t + 8 * a) * t - 4 * a
    return near * (t <= 1) + far * ((t > 1) & (t < 2))


def _cubic(length, size, align_corners, scale, dtype):
    source = _sources(length, size, align_corners, scale, dtype)
    low = np.floor(source)
    offsets = np.arange(-1, 3)
    part = (source - low)[:, None]
    index = np.clip(low[:, None].astype(np.int64) + offsets, 0, length - 1)
    return index, cubic(np.abs(part - offsets), -0.75).astype(dtype)


def _antialiased(width, kernel):
    """Return places and weights of a filter of ``width`` elements that stretches when the image shrinks."""

    def taps(length, size, align_corners, scale, dtype):
        step = _scale(length, size, align_corners, scale, dtype)
        stretch = max(step, dtype(1))
        support = dtype(width / 2) * stretch
        centre = step * (np.arange(size, dtype=dtype) + dtype(0.5))
        first = np.maximum((centre - support + dtype(0.5)).astype(np.int64), 0)
        count = np.minimum((centre + support + dtype(0.5)).astype(np.int64), length) - first
        j = np.arange(count.max(initial=1))
        weights = kernel(np.abs((j + first[:, None] - centre[:, None] + dtype(0.5)) / stretch))
        weights = np.where(j < count[:, None], weights, 0)
        weights = weights / weights.sum(1, keepdims=True)
        return np.minimum(first[:, None] + j, length - 1), weights.astype(dtype)

    return taps


_linear_aa = _antialiased(2, lambda t: np.maximum(1 - t, 0))
_cubic_aa = _antialiased(4, lambda t: cubic(t, -0.5))
_lanczos_aa = _antialiased(6, lambda t: np.where(t < 3, np.sinc(t) * np.sinc(t / 3), 0))


def _dense(index, weights, length, dtype):
    """Return the [size, length] matrix of the weights, made of comparisons: the graph holds no large constant."""
    columns = jnp.arange(length)
    weights = np.ones(index.shape) if weights is None else weights
    taps = zip(index.T, weights.T, strict=True)
    return sum(jnp.where(columns == i[:, None], jnp.asarray(w, dtype)[:, None], 0) for i, w in taps)


def _product(x, axis, matrix, contract):
    """Return ``x`` multiplied along ``axis`` with dimension ``contract`` of ``matrix``."""
    return jnp.moveaxis(lax.dot_general(x, matrix, (((axis,), (contract,)), ((), ()))), -1, axis)


def _resample(x, axis, index, weights):
    if index.shape[1] > MOST_TAPS:
        return _product(x, axis, _dense(index, weights, x.shape[axis], x.dtype), 1)
    length, size = x.shape[axis], len(index)
    if weights is None and length and size % length == 0 and (index[:, 0] == np.arange(size) // (size // length)).all():
        return x if size == length else jnp.repeat(x, size // length, axis)
    total = None
    for k in range(index.shape[1]):
        tap = jnp.take(x, index[:, k], axis, mode="clip")
        if weights is not None:
            tap = tap * jnp.asarray(weights[:, k], x.dtype).reshape(-1, *[1] * (x.ndim - axis - 1))
        total = tap if total is None else total + tap
    return total


def _narrowed(weights, dtype):
    """Return weights as the CPU keeps them, in the type of the image; of two, the first is what the second leaves."""
    narrow = weights.astype(dtype)
    if narrow.dtype != weights.dtype and weights.shape[1] == 2:
        narrow[:, 0] = 1 - narrow[:, 1]
    return narrow


def _kept(length, size):
    """Return the taps of a dimension that keeps its size, whatever the scale; None for others."""
    return (np.arange(size)[:, None], None) if size == length else None


def _kept_or_doubled(length, size):
    return (np.arange(size)[:, None] // 2, None) if size == 2 * length else _kept(length, size)


def _never(length, size):
    return None


def _along_each(taps, shortcut, spatial, sizes, align_corners, scales, dtype):
    """Return places and weights for every dimension; ``shortcut`` gives those that do not depend on the scale."""
    scales = (*scales, *[None] * (len(sizes) - len(scales)))
    return [
        shortcut(length, size) or taps(length, size, align_corners, scale, np.dtype(dtype).type)
        for length, size, scale in zip(spatial, sizes, scales, strict=True)
    ]


def _upsampling(taps, aligns, shortcut, shortcut_back):
    """Return the rules of one mode and of its gradient.

    Args:
        taps: gives places and weights of a dimension.
        aligns: whether the op has ``align_corners``.
        shortcut, shortcut_back: what the CPU takes in place of ``taps`` for sizes that it treats apart, of the result
            and of the gradient.
    """

    def forward(out, x, output_size, *how, **_):
        align, scales = (how[0], how[1:]) if aligns else (False, how)
        exact = taps in (_nearest, _nearest_exact)
        how = x.shape[2:], out.shape[2:], align, scales
        if not exact and x.dtype == jnp.uint8:
            for i, (index, weights) in reversed([*enumerate(_along_each(taps, _kept, *how, np.float64))]):
                x = x if weights is None else resample_bytes(x, i + 2, index, weights)
            return x
        dtype = x.dtype if exact else compute_dtype(x.dtype)
        # The CPU has two kernels for linear images, and takes the one that keeps float32 weights for small results.
        narrow = not exact and not (taps is _linear and len(how[1]) == 2 and sum(how[1]) <= 128)
        y = x.astype(dtype)
        for i, (index, weights) in enumerate(_along_each(taps, shortcut, *how, dtype)):
            narrowed = _narrowed(weights, x.dtype) if narrow and weights is not None else weights
            y = _resample(y, i + 2, index, narrowed)
        return y.astype(out.dtype)

    def backward(out, grad, output_size, input_size, *how, **_):
        align, scales = (how[0], how[1:]) if aligns else (False, how)
        dtype = compute_dtype(grad.dtype)
        sizes = out.shape[2:], grad.shape[2:]
        if taps is _cubic and sizes[0] == sizes[1]:  # the CPU takes all dimensions apart, or none
            return grad.astype(out.dtype)
        y = grad.astype(dtype)
        for i, (index, w) in enumerate(_along_each(taps, shortcut_back, *sizes, align, scales, dtype)):
            length = out.shape[i + 2]
            if w is not None or not np.array_equal(index[:, 0], np.arange(length)):
                y = _product(y, i + 2, _dense(index, w, length, dtype), 0)
        return y.astype(out.dtype)

    return forward, backward


_MODES = {
    "upsample_nearest1d": (_nearest, False, _never, _kept_or_doubled),
    "upsample_nearest2d": (_nearest, False, _kept_or_doubled, _kept_or_doubled),
    "upsample_nearest3d": (_nearest, False, _never, _kept_or_doubled),
    "_upsample_nearest_exact1d": (_nearest_exact, False, _never, _never),
    "_upsample_nearest_exact2d": (_nearest_exact, False, _never, _never),
    "_upsample_nearest_exact3d": (_nearest_exact, False, _never, _never),
    "upsample_linear1d": (_linear, True, _kept, _kept),
    "upsample_bilinear2d": (_linear, True, _kept, _kept),
    "upsample_trilinear3d": (_linear, True, _kept, _kept),
    "upsample_bicubic2d": (_cubic, True, _never, _never),
    "_upsample_bilinear2d_aa": (_linear_aa, True, _kept, _never),
    "_upsample_bicubic2d_aa": (_cubic_aa, True, _kept, _never),
    "_upsample_lanczos2d_aa": (_lanczos_aa, True, _kept, _never),
}
for _name, _mode in _MODES.items():
    if hasattr(aten, _name):  # the Lanczos filter is newer than the others
        _rules = _upsampling(*_mode)
        lowers(getattr(aten, _name).default)(_rules[0])
        lowers(getattr(aten, _name + "_backward").default)(_rules[1])
