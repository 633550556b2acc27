"""Convolutions as matrix products, for CPUs, whose convolution in XLA is several times slower.

A window is a list of taps.  The columns of an input [channel, image, *places] are its taps side by side,
[channel, tap, image, *places]; a convolution is the product of the weight, as it lies in memory, with the
columns.  Images are taken a few at a time in a loop, so that the columns stay in the cache.
"""

import itertools
import os
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lazytpu.lowering.support import wide_products

CORES = os.cpu_count() or 1
PLACES = 256 * CORES  # columns of one product: enough for the matrix kernel to be fast on every core
COLUMN_BYTES = 3 * CORES << 19  # memory for columns at a time: about what second level caches hold


# A start of a slice that may be negative is a kernel of its own for XLA to compile.
dynamic_slice = partial(lax.dynamic_slice, allow_negative_indices=False)
dynamic_update_slice = partial(lax.dynamic_update_slice, allow_negative_indices=False)

# A network convolves arrays of equal types again and again: each kind is traced once, and called.
_shared = partial(jax.jit, static_argnums=(2, 3, 4, 5))


def _offsets(kernel, padding, dilation):
    """Return where each tap of each dimension begins in the input."""
    return [[j * d - p for j in range(k)] for k, p, d in zip(kernel, padding, dilation, strict=True)]


def _framed(x, sizes, stride, offsets):
    """Return ``x`` padded so that no tap leaves it, and the offsets counted from its new corner."""
    pads, moved = [(0, 0, 0)] * (x.ndim - len(sizes)), []
    for length, size, s, offset in zip(x.shape[-len(sizes) :], sizes, stride, offsets, strict=True):
        low = max(0, -min(offset))
        pads.append((low, max(0, (size - 1) * s + max(offset) + 1 - length), 0))
        moved.append([o + low for o in offset])
    return (lax.pad(x, jnp.zeros((), x.dtype), pads) if any(map(any, pads)) else x), moved


def _laid(columns, x, first, stride, offsets):
    """Return the ``columns`` [channel, tap, image, *sizes] of the images of x from ``first`` on, over what they held.

    In a loop over the taps: XLA compiles one copy, where it would compile another one for each slice.
    """
    (channels, _, count, *sizes), taps = columns.shape, np.array([*itertools.product(*offsets)], np.int32)
    starts, zero = jnp.asarray(taps), jnp.int32(0)

    def lay(t, columns):
        t = lax.convert_element_type(t, jnp.int32)  # jax counts in 64 bits where it differentiates
        start = dynamic_slice(starts, [t, zero], [1, len(sizes)])
        tap = tap_at(x, first, start, (count, channels, *sizes), stride)
        return dynamic_update_slice(columns, _channels_first(tap)[:, None], [zero, t, *[zero] * (x.ndim - 1)])

    return lax.fori_loop(jnp.int32(0), jnp.int32(len(taps)), lay, columns)


def tap_at(x, first, start, shape, stride):
    """Return the tap of the images of x from ``first`` on that begins at ``start`` [1, dim] and has a ``shape``."""
    spans = [(n - 1) * s + 1 for n, s in zip(shape[2:], stride, strict=True)]
    corner = [first, jnp.int32(0), *(start[0, d] for d in range(len(spans)))]
    tap = dynamic_slice(x, corner, [*shape[:2], *spans])
    return lax.slice(tap, [0] * tap.ndim, tap.shape, (1, 1, *stride))


def _images_at_a_time(images, places, rows, itemsize):
    """Return the divisor of ``images`` that makes products of about ``PLACES`` columns within ``COLUMN_BYTES``."""
    most = min(-(-PLACES // places), COLUMN_BYTES // (places * rows * itemsize))
    return divisor_up_to(most, images)


def divisor_up_to(most, number):
    """Return the largest divisor of a number that is at most ``most``, at least 1."""
    return max(c for c in range(1, max(1, min(most, number)) + 1) if number % c == 0)


def _loop(count, body, init):
    """Return ``lax.fori_loop``, or just its body where there is one iteration."""
    return body(jnp.int32(0), init) if count == 1 else lax.fori_loop(jnp.int32(0), jnp.int32(count), body, init)


def _channels_first(x):
    """Return images [image, channel, *spatial] as [channel, image, *spatial]."""
    return jnp.swapaxes(x, 0, 1) if len(x) > 1 else x.reshape(x.shape[1], 1, *x.shape[2:])


def _taken(x, i, count):
    """Return ``count`` images from the ``i``-th group on, as [channel, image, *spatial]."""
    return _channels_first(x if count == len(x) else taken(x, i * count, count, 0))


def taken(x, start, count, axis):
    """Return ``lax.dynamic_slice_in_dim`` of a start that is not negative."""
    starts = [jnp.int32(0)] * x.ndim
    starts[axis] = start
    return dynamic_slice(x, starts, [count if d == axis else n for d, n in enumerate(x.shape)])


def put(x, part, start, axis):
    """Return ``lax.dynamic_update_slice_in_dim`` of a start that is not negative."""
    starts = [jnp.int32(0)] * x.ndim
    starts[axis] = start
    return dynamic_update_slice(x, part, starts)


def _product(x, w, sizes, stride, offsets):
    """Return the sum over channels c and taps t of ``w[o, c, t] * x[n, c, i * stride + offset[t]]``, as [n, o, *i]."""
    images, rows, places = len(x), w.shape[1] * w.shape[2], int(np.prod(sizes))
    x, offsets = _framed(x, sizes, stride, offsets)
    matrix = w.reshape(len(w), rows)
    count = _images_at_a_time(images, places, rows, x.dtype.itemsize)

    def body(i, carried):  # the columns too: another iteration fills the same memory
        y, columns = carried
        columns = _laid(columns, x, i * count, stride, offsets)
        part = wide_products.dot(matrix, columns.reshape(rows, count * places), (((1,), (0,)), ((), ())), x.dtype)
        part = part.reshape(len(w), count, places)
        part = jnp.swapaxes(part, 0, 1)
        return (part if count == images else put(y, part, i * count, 0)), columns

    empty = jnp.zeros((x.shape[1], w.shape[2], count, *sizes), x.dtype)
    y, _ = _loop(images // count, body, (jnp.zeros((images, len(w), places), x.dtype), empty))
    return y.reshape(images, len(w), *sizes)


@_shared
def forward(x, w, sizes, stride, padding, dilation):
    """Return the convolution of x [image, channel, *spatial] with w [out, channel, *kernel], of spatial ``sizes``."""
    offsets = _offsets(w.shape[2:], padding, dilation)
    return _product(x, w.reshape(*w.shape[:2], -1), sizes, stride, offsets)


def _folded(columns, spatial, sizes, stride, offsets):
    """Return the transpose of ``_laid``: each tap is laid out over the input it came from, and all are added."""
    zero, total = jnp.zeros((), columns.dtype), None
    for t, tap in enumerate(itertools.product(*offsets)):
        pads = [(o, n - o - (m - 1) * s - 1, s - 1) for o, n, m, s in zip(tap, spatial, sizes, stride, strict=True)]
        part = lax.pad(lax.index_in_dim(columns, t, 1, False), zero, [(0, 0, 0), (0, 0, 0), *pads])
        total = part if total is None else total + part
    return total


@_shared
def input_gradient(grad, w, spatial, stride, padding, dilation):
    """Return the transpose of ``forward`` in x, whose spatial sizes are ``spatial``."""
    images, sizes, places, channels = len(grad), grad.shape[2:], int(np.prod(grad.shape[2:])), w.shape[1]
    taps = int(np.prod(w.shape[2:]))
    matrix, rows = w.reshape(len(w), channels * taps), channels * taps
    how = spatial, sizes, stride, _offsets(w.shape[2:], padding, dilation)
    if images * places < rows:
        # Few places and many weights: a product that does not turn the weights around.
        columns = lax.dot_general(grad.reshape(images, len(w), places), matrix, (((1,), (0,)), ((), ())))
        columns = columns.reshape(images, places, channels, taps).transpose(2, 3, 0, 1)
        return jnp.swapaxes(_folded(columns.reshape(channels, taps, images, *sizes), *how), 0, 1)
    count = _images_at_a_time(images, places, rows, grad.dtype.itemsize)

    def body(i, y):
        part = _taken(grad, i, count).reshape(len(w), count * places)
        columns = lax.dot_general(matrix, part, (((0,), (0,)), ((), ())))
        part = jnp.swapaxes(_folded(columns.reshape(channels, taps, count, *sizes), *how), 0, 1)
        return part if count == images else put(y, part, i * count, 0)

    return _loop(images // count, body, jnp.zeros((images, channels, *spatial), grad.dtype))


@_shared
def weight_gradient(grad, x, kernel, stride, padding, dilation):
    """Return the transpose of ``forward`` in w, whose kernel is ``kernel``."""
    sizes, images = grad.shape[2:], len(x)
    rows, places = x.shape[1] * int(np.prod(kernel)), int(np.prod(sizes))
    count = _images_at_a_time(images, places, rows, x.dtype.itemsize)
    padded, offsets = _framed(x, sizes, stride, _offsets(kernel, padding, dilation))

    def body(i, carried):
        total, columns = carried
        columns = _laid(columns, padded, i * count, stride, offsets)
        part = _taken(grad, i, count).reshape(grad.shape[1], count * places)
        return total + lax.dot_general(part, columns.reshape(rows, count * places), (((1,), (1,)), ((), ()))), columns

    empty = jnp.zeros((x.shape[1], int(np.prod(kernel)), count, *sizes), x.dtype)
    total, _ = _loop(images // count, body, (jnp.zeros((grad.shape[1], rows), x.dtype), empty))
    return total.reshape(grad.shape[1], x.shape[1], *kernel)
