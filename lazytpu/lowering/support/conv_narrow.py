"""Convolution in half precision as the CPU's plain kernels compute it: they round more often than once.

A transposed convolution rounds after every tap added, the gradient of a weight after every element of the batch.
These kernels serve the types and shapes that oneDNN does not take.
"""

import itertools

import jax.numpy as jnp
import numpy as np
from jax import lax

from lazytpu.lowering.support.operands import rounded


def takes_plain_kernel(dtype, stride, output_padding):
    """Return whether the CPU does so: always for float16, for bfloat16 where a transposed result is padded widely."""
    wide = any(p >= s for p, s in zip(output_padding, stride, strict=True))
    return dtype == jnp.float16 or dtype == jnp.bfloat16 and wide


def transposed(x, w, shape, dtype, stride, padding, dilation, groups):
    """Return the transposed convolution of f32 arrays, rounded to ``dtype`` after each tap, in their order.

    Args:
        x: [batch, in, *spatial].
        w: [in, out / groups, *kernel].
        shape: of the result.
        dtype: the half-precision type.
        stride, padding, dilation: one number a dimension.
        groups: of channels.
    """
    kernel, n = w.shape[2:], len(stride)
    taps = int(np.prod(kernel))
    grouped = x.reshape(x.shape[0], groups, x.shape[1] // groups, -1)
    weights = w.reshape(groups, w.shape[0] // groups, w.shape[1], taps)
    columns = rounded(jnp.einsum("bgip,giot->tbgop", grouped, weights), dtype)
    columns = columns.reshape(taps, *shape[:2], *x.shape[2:])
    columns = lax.pad(columns, jnp.zeros((), x.dtype), [(0, 0, 0)] * 3 + [(0, 0, s - 1) for s in stride])
    offsets = np.array([*itertools.product(*map(range, kernel))], np.int32) * np.array(dilation, np.int32)
    # Where the result is padded, no tap reaches some of its end; where padding is cut off, it has been added up first.
    full = [
        max(o + p, c + (k - 1) * d)
        for o, p, c, k, d in zip(shape[2:], padding, columns.shape[3:], kernel, dilation, strict=True)
    ]

    def add(t, total):
        column, start = columns[t], (0, 0, *(jnp.asarray(offsets)[t, i] for i in range(n)))
        start = tuple(jnp.asarray(i, jnp.int32) for i in start)
        sums = rounded(lax.dynamic_slice(total, start, column.shape) + column, dtype)
        return lax.dynamic_update_slice(total, sums, start)

    total = lax.fori_loop(0, taps, add, jnp.zeros((*shape[:2], *full), x.dtype))
    return total[(..., *(slice(p, p + o) for p, o in zip(padding, shape[2:], strict=True)))]


def summed_by_element(of_element, batches, shape, dtype):
    """Return the sum, rounded to ``dtype`` after each element, of ``of_element`` of each element of f32 arrays.

    Args:
        of_element: a function of arrays like ``batches`` with a batch of one.
        batches: arrays [batch, ...].
        shape: of the result.
        dtype: the half-precision type.
    """

    def add(total, element):
        return rounded(total + of_element(*(x[None] for x in element)), dtype), None

    return lax.scan(add, jnp.zeros(shape, batches[0].dtype), batches)[0]
