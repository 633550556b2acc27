"""Grouped convolutions on CPUs, where XLA's are up to a thousand times slower than matrix products.

With one channel a group there is nothing to multiply as matrices: each tap is scaled and added.  Other
groups are convolutions of their own, one after the other.
"""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lazytpu.lowering.support import conv_matmul
from lazytpu.lowering.support.conv_matmul import CORES, _framed, _loop, _offsets, divisor_up_to, put, taken

_PLACES = 1 << 13  # of a result from which on a loop is worth an iteration
_BLOCK = 16  # places of a row that are multiplied with each other; all but a kernel's width of the products are waste
_COLUMN_BYTES = CORES << 23  # memory for the columns of such products at a time


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


def _depthwise_in_turn(x, w, sizes, stride, offsets):
    """Return ``_depthwise`` by a loop over images, or over the channels of a single one.

    A loop's result is put in memory.  What is no loop's is computed by XLA once for each reader, with all its taps.
    """
    axis = 0 if len(x) > 1 else 1
    size, multiple = x.shape[axis], (1, w.shape[1])[axis]
    places = len(x) * w.shape[0] * w.shape[1] * math.prod(sizes) // max(size, 1)  # of each part of the result
    count = divisor_up_to(min(size // 2, -(-_PLACES // max(places, 1))), size)
    if size < 2 or count * places < _PLACES // 4:
        return _depthwise(x, w, sizes, stride, offsets)

    def body(i, y):
        part = taken(x, i * count, count, axis)
        of_part = taken(w, i * count, count, 0) if axis else w
        part = _depthwise(part, of_part, sizes, stride, offsets)
        return put(y, part, i * count * multiple, axis)

    x, offsets = _framed(x, sizes, stride, offsets)
    y = jnp.zeros((len(x), w.shape[0] * w.shape[1], *sizes), x.dtype)
    return _loop(size // count, body, y)


def _taps_last(w, channels):
    return w.reshape(channels, -1, int(np.prod(w.shape[2:])))


def forward(x, w, sizes, stride, padding, dilation, groups):
    if w.shape[1] == 1:
        return _depthwise_in_turn(x, _taps_last(w, groups), sizes, stride, _offsets(w.shape[2:], padding, dilation))
    how = sizes, stride, padding, dilation
    y = lax.map(lambda xw: conv_matmul.forward(*xw, *how), (_split(x, groups, 1), _split(w, groups, 0)))
    return _joined(y, 1)


def input_gradient(grad, w, spatial, stride, padding, dilation, groups):
    if w.shape[1] != 1:
        how = spatial, stride, padding, dilation
        y = lax.map(lambda gw: conv_matmul.input_gradient(*gw, *how), (_split(grad, groups, 1), _split(w, groups, 0)))
        return _joined(y, 1)
    offsets = _offsets(w.shape[2:], padding, dilation)
    if grad.shape[1] == groups:
        return _depthwise_input_gradient(grad, w.reshape(groups, *w.shape[2:]), spatial, stride, offsets)
    x = jax.ShapeDtypeStruct((len(grad), groups, *spatial), grad.dtype)
    spread = jax.linear_transpose(lambda x: _depthwise(x, _taps_last(w, groups), grad.shape[2:], stride, offsets), x)
    return spread(grad)[0]


def _depthwise_input_gradient(grad, w, spatial, stride, offsets):
    """Return the places of the input by their remainders after division by the stride: each has taps of its own."""
    images, channels, axes = len(grad), grad.shape[1], range(len(spatial))
    sizes = [-(-n // s) for n, s in zip(spatial, stride, strict=True)]
    parts = []
    for remainders in itertools.product(*map(range, stride)):
        kept, back = w, []
        for d, (offset, r, s) in enumerate(zip(offsets, remainders, stride, strict=True)):
            taps = [j for j, o in enumerate(offset) if (o - r) % s == 0]
            back.append([(r - offset[j]) // s for j in taps])
            kept = kept if len(taps) == len(offset) else jnp.take(kept, np.array(taps, np.int32), d + 1)
        if kept.size:
            parts.append(_depthwise_in_turn(grad, kept.reshape(channels, 1, -1), sizes, [1] * len(sizes), back))
        else:
            parts.append(jnp.zeros((images, channels, *sizes), grad.dtype))
    if len(parts) == 1:
        return parts[0]
    x = jnp.stack(parts, 2).reshape(images, channels, *stride, *sizes)
    x = x.transpose(0, 1, *(i for d in axes for i in (2 + len(sizes) + d, 2 + d)))
    x = x.reshape(images, channels, *(n * s for n, s in zip(sizes, stride, strict=True)))
    return x[(..., *(slice(n) for n in spatial))]


def weight_gradient(grad, x, kernel, stride, padding, dilation, groups):
    if x.shape[1] != groups:
        how = kernel, stride, padding, dilation
        w = lax.map(lambda gx: conv_matmul.weight_gradient(*gx, *how), (_split(grad, groups, 1), _split(x, groups, 1)))
        return _joined(w, 0)
    return _depthwise_weight_gradient(grad, x, kernel, stride, padding, dilation, groups)


def _depthwise_weight_gradient(grad, x, kernel, stride, padding, dilation, groups):
    """Return the gradient of depthwise weights by one product a channel; a sum for each tap would be a kernel each.

    The last dimension is taken in blocks of places.  A block of the gradient, times the part of each row of the input
    that it was computed from, summed over rows, images and blocks, has the sums of all taps on its diagonals.
    """
    images, sizes, multiple = len(x), grad.shape[2:], grad.shape[1] // groups
    blocks = -(-sizes[-1] // _BLOCK)
    places = -(-sizes[-1] // blocks)
    whole = (*sizes[:-1], blocks * places)
    framed, offsets = _framed(x, whole, stride, _offsets(kernel, padding, dilation))
    if whole != sizes:
        grad = lax.pad(grad, jnp.zeros((), grad.dtype), [*[(0, 0, 0)] * (grad.ndim - 1), (0, whole[-1] - sizes[-1], 0)])
    grad = grad.reshape(images, groups, multiple, *sizes[:-1], blocks, places)
    first = min(offsets[-1])
    lasts = np.array(offsets[-1]) - first
    span, shift = (places - 1) * stride[-1] + max(lasts) + 1, places * stride[-1]
    starts = [*itertools.product(*offsets[:-1])]
    limits = [[o + (n - 1) * s + 1 for o, n, s in zip(t, sizes[:-1], stride[:-1], strict=True)] for t in starts]
    rows = int(np.prod(sizes[:-1])) * blocks
    count = divisor_up_to(_COLUMN_BYTES // (rows * groups * len(starts) * span * x.dtype.itemsize), images)
    axis = len(sizes)  # where images stand, between rows and blocks

    def body(i, total):
        part, of_part = (taken(a, i * count, count, 0) for a in (framed, grad))
        part = jnp.moveaxis(part, 0, axis)  # [channel, *rows, image, place]
        taps = []
        for start, limit in zip(starts, limits, strict=True):
            corner, end = (0, *start, 0, 0), (groups, *limit, count, part.shape[-1])
            tap = _windows(lax.slice(part, corner, end, (1, *stride[:-1], 1, 1)), first, blocks, shift, span)
            taps.append(tap.reshape(groups, rows * count, span))
        columns = jnp.stack(taps, 2).reshape(groups, rows * count, -1)
        of_part = jnp.moveaxis(of_part, (0, 2), (axis, axis + 2)).reshape(groups, rows * count, -1)
        return total + lax.dot_general(columns, of_part, (((1,), (1,)), ((0,), (0,))))

    product = jnp.zeros((groups, len(starts) * span, multiple * places), x.dtype)
    product = _loop(images // count, body, product).reshape(groups, len(starts), span, multiple, places)
    place = np.arange(places)  # diagonals are [tap, place, channel, tap of rows, multiple]
    diagonals = product[:, :, lasts[:, None] + place * stride[-1], :, place]
    return diagonals.sum(1).transpose(1, 3, 2, 0).reshape(groups * multiple, 1, *kernel)


def _windows(x, first, blocks, step, span):
    """Return ``blocks`` windows of the last dimension, ``span`` long and ``step`` apart, as the last two dimensions."""
    windows = [lax.slice_in_dim(x, first + b * step, first + b * step + span, axis=-1) for b in range(blocks)]
    return windows[0] if blocks == 1 else jnp.stack(windows, -2)
