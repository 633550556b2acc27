"""Interpolation of images in bytes: weights of 16 bits, and a result of bytes after each dimension.

The width goes before the height.  The weights are float64, scaled by the largest power of two that leaves the largest
of them below 2 ** 15, and rounded half away from zero.  Places beyond a border are those of the border.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

MOST_PRECISION = 22


def _precision(largest):
    """Return bits after the point of the weights, of which ``largest`` is the largest."""
    bits = 0
    while bits < MOST_PRECISION and int(0.5 + largest * (1 << bits + 1)) < 1 << 15:
        bits += 1
    return bits


def byte_weights(index, weights, length):
    """Return the [size, length] matrix of integer weights, and their bits after the point.

    Args:
        index: places in the input, [size, taps].
        weights: f64[size, taps]; those of a place add up.
        length: of the input.
    """
    dense, largest = np.zeros((len(index), length)), 0.0
    rows = np.arange(len(index))
    for places, part in zip(index.T, weights.T, strict=True):
        dense[rows, places] += part
        largest = max(largest, dense[rows, places].max(initial=0))
    bits = _precision(largest)
    scaled = dense * (1 << bits)
    return np.trunc(scaled + np.where(dense < 0, -0.5, 0.5)).astype(np.int32), bits


def resample_bytes(x, axis, index, weights):
    """Return ``x``, u8, resampled along ``axis``."""
    matrix, bits = byte_weights(index, weights, x.shape[axis])
    if not bits:
        return x
    sums = lax.dot_general(x.astype(jnp.int32), jnp.asarray(matrix), (((axis,), (1,)), ((), ())))
    sums = lax.shift_right_arithmetic(sums + (1 << bits - 1), jnp.int32(bits))
    return jnp.moveaxis(jnp.clip(sums, 0, 255).astype(x.dtype), -1, axis)
