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
from lazytpu.lowering.support.calls import apart
from lazytpu.lowering.support.conv_matmul import (
    CORES,
    _framed,
    _loop,
    _offsets,
    divisor_up_to,
    dynamic_slice,
    put,
    taken,
    tap_at,
)

_TAPS = 64  # of a window up to which a loop over them is the fastest gradient of depthwise weights
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


def _depthwise(sizes, stride, offsets, x, w):
    """``w`` is [channel, multiple, tap]; the result [image, channel * multiple, *sizes]."""
    x, offsets = _framed(x, sizes, stride, offsets)
    w = w.reshape(*w.shape, *[1] * len(sizes))
    y = sum(tap[:, :, None] * w[:, :, t] for t, tap in enumerate(_each_tap(x, sizes, stride, offsets)))
    return y.reshape(len(x), -1, *sizes)


def _depthwise_apart(x, w, sizes, stride, offsets):
    """Return ``_depthwise``, put in memory: XLA would compute it once for each reader, with all its taps."""
    return apart(_depthwise, tuple(sizes), tuple(stride), tuple(map(tuple, offsets)))(x, w)


def _taps_last(w, channels):
    return w.reshape(channels, -1, int(np.prod(w.shape[2:])))


def forward(x, w, sizes, stride, padding, dilation, groups):
    if w.shape[1] == 1:
        return _depthwise_apart(x, _taps_last(w, groups), sizes, stride, _offsets(w.shape[2:], padding, dilation))
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
    spread = jax.linear_transpose(lambda x: _depthwise(grad.shape[2:], stride, offsets, x, _taps_last(w, groups)), x)
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
            parts.append(_depthwise_apart(grad, kept.reshape(channels, 1, -1), sizes, [1] * len(sizes), back))
        else:
            parts.append(jnp.zeros((images, channels, *sizes), grad.dtype))
    if len(parts) == 1:
        return parts[0]
    x = jnp.stack(parts, 2).reshape(images, channels, *stride, *sizes)
    x = x.transpose(0, 1, *(i for d in axes for i in (2 + len(sizes) + d, 2 + d)))
    x = x.reshape(images, channels, *(n * s for n, s in zip(sizes, stride, strict=True)))
    return x[(..., *(slice(n) for n in spatial))]


def weight_gradient(grad, x, kernel, stride, padding, dilation, groups):
    how = kernel, stride, padding, dilation
    if x.shape[1] != groups:
        w = lax.map(lambda gx: conv_matmul.weight_gradient(*gx, *how), (_split(grad, groups, 1), _split(x, groups, 1)))
        return _joined(w, 0)
    by_tap = math.prod(kernel) <= _TAPS
    return (_depthwise_weight_gradient_by_tap if by_tap else _depthwise_weight_gradient)(grad, x, *how)


def _depthwise_weight_gradient_by_tap(grad, x, kernel, stride, padding, dilation):
    """Return the gradient of depthwise weights by a loop over the taps, whose body sums over the images.

    What is left to sum is a product with ones, for all taps at once.
    """
    images, channels, *sizes = grad.shape
    x = jnp.repeat(x, channels // x.shape[1], 1)
    framed, offsets = _framed(x, sizes, stride, _offsets(kernel, padding, dilation))
    starts, zero = jnp.asarray(np.array([*itertools.product(*offsets)], np.int32)), jnp.int32(0)
    axes = (0, 2) if images == 1 and len(sizes) > 1 else (0,)  # rows, where there are no images to sum over
    places = math.prod(sizes[len(axes) - 1 :])
    sum_of = apart(_tap_times, tuple(stride), axes)

    def body(t, sums):
        start = dynamic_slice(starts, [t, zero], [1, len(sizes)])
        return put(sums, sum_of(grad, framed, start).reshape(1, channels, places), t, 0)

    sums = _loop(len(starts), body, jnp.zeros((len(starts), channels, places), x.dtype))
    return (sums @ jnp.ones(places, x.dtype)).T.reshape(channels, 1, *kernel)


def _tap_times(stride, axes, grad, x, start):
    """Return the sum over ``axes`` of grad [image, channel, *sizes] times the tap of x from ``start`` [1, dim] on."""
    return (grad * tap_at(x, jnp.int32(0), start, grad.shape, stride)).sum(axes)


def _depthwise_weight_gradient(grad, x, kernel, stride, padding, dilation):
    """Return the gradient of depthwise weights by one product a channel; a sum for each tap would be a kernel each.

    The last dimension is taken in blocks of places.  A block of the gradient, times the part of each row of the input
    that it was computed from, summed over rows, images and blocks, has the sums of all taps on its diagonals.
    """
    images, groups, sizes = len(x), x.shape[1], grad.shape[2:]
    multiple = grad.shape[1] // groups
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
