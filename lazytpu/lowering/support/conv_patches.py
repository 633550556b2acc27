"""Convolutions on CPUs whose windows do not overlap: of one tap, or as far apart as they are long.

Their columns are the input itself, in another order at most.  So each of the three maps is one product, without the
loop over images of ``conv_matmul``.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax


def takes(kernel, stride, padding, dilation):
    """Return whether the windows of a convolution without groups are such."""
    one, apart = all(k == 1 for k in kernel), all(d == 1 for d in dilation) and tuple(kernel) == tuple(stride)
    return not any(padding) and (one or apart)


def forward(x, w, sizes, stride):
    """Return the convolution of x [image, channel, *spatial] with w [out, channel, *kernel], of spatial ``sizes``."""
    columns = _columns(x, w.shape[2:], sizes, stride)
    return _products(w.reshape(len(w), -1), columns, 1).reshape(len(x), len(w), *sizes)


def input_gradient(grad, w, spatial, stride):
    """Return the transpose of ``forward`` in x, whose spatial sizes are ``spatial``."""
    sizes, kernel, axes = grad.shape[2:], w.shape[2:], range(len(spatial))
    columns = _products(w.reshape(len(w), -1), grad.reshape(*grad.shape[:2], -1), 0)
    order = 0, 1, *(i for d in axes for i in (2 + len(kernel) + d, 2 + d))
    x = columns.reshape(len(grad), w.shape[1], *kernel, *sizes).transpose(order)
    x = x.reshape(len(grad), w.shape[1], *(n * k for n, k in zip(sizes, kernel, strict=True)))
    gaps = [s - k for s, k in zip(stride, kernel, strict=True)]
    ends = [n - m * k - (m - 1) * g for n, m, k, g in zip(spatial, sizes, kernel, gaps, strict=True)]
    pads = [(0, 0, 0)] * 2 + [(0, end, gap) for end, gap in zip(ends, gaps, strict=True)]
    return lax.pad(x, jnp.zeros((), x.dtype), pads) if any(map(any, pads)) else x


def weight_gradient(grad, x, kernel, stride):
    """Return the transpose of ``forward`` in w, whose kernel is ``kernel``."""
    columns, grad = _columns(x, kernel, grad.shape[2:], stride), grad.reshape(*grad.shape[:2], -1)
    if _is_wide(grad.shape[1], columns):
        w = lax.dot_general(grad, columns, (((0, 2), (0, 2)), ((), ())))
    else:
        w = lax.dot_general(grad, columns, (((2,), (2,)), ((0,), (0,)))).sum(0)
    return w.reshape(grad.shape[1], x.shape[1], *kernel)


def _columns(x, kernel, sizes, stride):
    """Return the windows of x as [image, channel * tap, place]."""
    if any(k > 1 for k in kernel):
        x = x[(..., *(slice(n * k) for n, k in zip(sizes, kernel, strict=True)))]
        x = x.reshape(*x.shape[:2], *(i for n, k in zip(sizes, kernel, strict=True) for i in (n, k)))
        x = x.transpose(0, 1, *range(3, x.ndim, 2), *range(2, x.ndim, 2))
    else:
        x = x[(..., *(slice(0, (n - 1) * s + 1, s) for n, s in zip(sizes, stride, strict=True)))]
    return x.reshape(len(x), -1, int(np.prod(sizes)))


def _is_wide(rows, columns):
    """Return whether a matrix with as many rows has more elements than what it is multiplied with, and what comes out.

    One such matrix for each image would cost more than to turn the images around.
    """
    return 2 * rows * columns.shape[1] > (rows + columns.shape[1]) * columns.shape[2]


def _products(matrix, columns, dim):
    """Return the products of a matrix, of which ``dim`` is summed over, with columns [image, row, place], by image."""
    if _is_wide(matrix.shape[1 - dim], columns):
        return jnp.swapaxes(lax.dot_general(columns, matrix, (((1,), (dim,)), ((), ()))), 1, 2)
    each = jnp.broadcast_to(matrix, (len(columns), *matrix.shape))
    return lax.dot_general(each, columns, (((1 + dim,), (1,)), ((0,), (0,))))
