"""Pooling and its gradients.

A window is taken apart into its taps: a tap is the input seen through one offset of the window, a
strided slice.  Dimensions are reduced one after the other, so a 3x3 window costs six taps, not nine.
The maximum carries its index along; on CPUs this is many times faster than XLA's window operators.
"""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from lazytpu.lowering.registry import lowers, on_mesh
from lazytpu.lowering.support.operands import compute_dtype

aten = torch.ops.aten

MOST_TAPS = 36  # a longer unrolled window costs more to compile than it saves


def _per_dim(values, n):
    """Return ``n`` integers: torch allows one for all dimensions."""
    return tuple(values) * n if len(values) == 1 else tuple(values)


def _window(kernel, stride, padding, n):
    """Return kernel, stride (the kernel's where not given) and padding, each with ``n`` entries."""
    kernel = _per_dim(kernel, n)
    return kernel, _per_dim(stride, n) if stride else kernel, _per_dim(padding, n)


def _lowest(dtype):
    return -np.inf if jnp.issubdtype(dtype, jnp.floating) else np.iinfo(dtype).min


def _taps(x, axis, size, k, s, p, d, fill):
    """Return the ``k`` strided slices of ``x``, padded with ``fill``, that a window along ``axis`` covers."""
    span = (size - 1) * s + (k - 1) * d + 1
    pads = [(0, 0, 0)] * x.ndim
    pads[axis] = (p, max(span - x.shape[axis] - p, 0), 0)
    x = lax.pad(x, jnp.asarray(fill, x.dtype), pads)
    return [lax.slice_in_dim(x, i * d, i * d + (size - 1) * s + 1, s, axis) for i in range(k)]


def _along(axis, ndim, values):
    """Return ``values``, an int32 vector, laid along ``axis`` of an ``ndim``-dimensional array."""
    return jnp.asarray(values, jnp.int32).reshape([-1 if i == axis else 1 for i in range(ndim)])


def _reduce_max(taps, axis, positions, length, index):
    """Reduce one dimension of a maximum pool: return the larger value of the taps, and its flat index.

    ``positions`` gives the coordinate of each tap, ``index`` the taps of the flat index in the
    dimensions reduced before (none at first), of which there are ``length`` elements.  The first of
    equal values wins, and the last NaN, as in eager torch.
    """
    best = where = None
    for i, (tap, position) in enumerate(zip(taps, positions, strict=True)):
        at = jnp.broadcast_to(position * length if index is None else position * length + index[i], tap.shape)
        if best is None:
            best, where = tap, at
            continue
        better = tap > best
        if jnp.issubdtype(tap.dtype, jnp.floating):
            better = better | (tap != tap)
        best, where = lax.max(best, tap), lax.select(better, at, where)
    return best, where


def _maxima(out, x, n, kernel, stride, padding, dilation):
    kernel, stride, padding = _window(kernel, stride, padding, n)
    dilation, lead = _per_dim(dilation, n), x.ndim - n
    value, index, length = x, None, 1
    for i in reversed(range(n)):
        axis, size = lead + i, out[0].shape[lead + i]
        k, s, p, d = kernel[i], stride[i], padding[i], dilation[i]
        starts = np.arange(size) * s - p
        positions = [starts + j * d for j in range(k)]
        # A window of nothing but -inf reports its first element inside the input.
        positions[0] = starts + -(np.minimum(starts, 0) // d) * d
        positions = [_along(axis, x.ndim, q) for q in positions]
        index = index if index is None else _taps(index, axis, size, k, s, p, d, 0)
        taps = _taps(value, axis, size, k, s, p, d, _lowest(x.dtype))
        value, index = _reduce_max(taps, axis, positions, length, index)
        length *= x.shape[axis]
    return value, index.astype(out[1].dtype)


def scattered(out, values, indices, n):
    """Add ``values`` at flat ``indices`` of the last ``n`` dimensions of a zero array."""
    lead = out.shape[: len(out.shape) - n]
    planes, size = int(np.prod(lead)), int(np.prod(out.shape[len(lead) :]))
    values, indices = values.reshape(planes, -1), indices.reshape(planes, -1)
    zeros = jnp.zeros((planes, size), compute_dtype(out.dtype))
    rows = lax.broadcasted_iota(jnp.int32, indices.shape, 0)
    return zeros.at[rows, indices].add(values.astype(zeros.dtype)).reshape(out.shape).astype(out.dtype)


def _seen_from_input(x, lead, spatial, stride, padding, shift, fill):
    """For each element of the input, what ``x`` holds for the last window but ``shift`` that may cover it."""
    for i, (length, s, p) in enumerate(zip(spatial, stride, padding, strict=True)):
        axis, windows = lead + i, (length - 1 + p) // s + 1
        pads = [(0, 0, 0)] * x.ndim
        pads[axis] = (shift[i], windows - shift[i] - x.shape[axis], 0)
        x = jnp.repeat(lax.pad(x, jnp.asarray(fill, x.dtype), pads), s, axis)
        x = lax.slice_in_dim(x, p, p + length, 1, axis)
    return x


def _claimed(grad, indices, spatial, stride, padding, cover):
    """Return the gradient of planes [plane, *spatial]: each element takes from windows what is marked as its own."""
    own, shape = 0, (len(grad), *spatial)
    for i, length in enumerate(spatial):
        own = own * length + lax.broadcasted_iota(jnp.int32, shape, i + 1)
    total = None
    for shift in np.ndindex(*cover):
        how = 1, spatial, stride, padding, shift
        at, value = _seen_from_input(indices, *how, -1), _seen_from_input(grad, *how, 0)
        part = lax.select(at == own, value, lax.full_like(value, 0))
        total = part if total is None else total + part
    return total


def _gradient_of_maxima(out, grad, indices, n, kernel, stride, padding, dilation):
    if 0 in grad.shape:
        return jnp.zeros(out.shape, out.dtype)
    kernel, stride, padding = _window(kernel, stride, padding, n)
    dilation, lead = _per_dim(dilation, n), grad.ndim - n
    cover = [-(-((k - 1) * d + 1) // s) for k, d, s in zip(kernel, dilation, stride, strict=True)]
    if np.prod(cover) > MOST_TAPS:
        return scattered(out, grad, indices, n)
    planes, spatial = int(np.prod(grad.shape[:lead])), out.shape[lead:]
    # The loop is there for its operands: XLA would otherwise find the indices again at every element.
    # On a mesh each device would wait in it for the planes of the others.
    iterations = 1 if on_mesh() else next((c for c in (2, 3, 5, 7) if planes % c == 0), 1)
    shape = (iterations, planes // iterations, *grad.shape[lead:])
    grad, indices = grad.astype(compute_dtype(out.dtype)).reshape(shape), indices.astype(jnp.int32).reshape(shape)
    if iterations == 1:
        return _claimed(grad[0], indices[0], spatial, stride, padding, cover).reshape(out.shape).astype(out.dtype)
    parts = lax.map(lambda part: _claimed(*part, spatial, stride, padding, cover), (grad, indices))
    return parts.reshape(out.shape).astype(out.dtype)


def _window_sum(x, sizes, kernel, stride, padding):
    """Return the sum over the windows of the last dimensions; elements off the input count as zero."""
    lead = x.ndim - len(sizes)
    for i, (size, k, s, p) in enumerate(zip(sizes, kernel, stride, padding, strict=True)):
        if k <= MOST_TAPS:
            taps = _taps(x, lead + i, size, k, s, p, 1, 0)
            x = sum(taps[1:], taps[0])
            continue
        window, strides, pads = [1] * x.ndim, [1] * x.ndim, [(0, 0)] * x.ndim
        window[lead + i], strides[lead + i] = k, s
        pads[lead + i] = p, (size - 1) * s + k - x.shape[lead + i] - p
        x = lax.reduce_window(x, jnp.zeros((), x.dtype), lax.add, window, strides, pads)
    return x


def _divisors(spatial, sizes, kernel, stride, padding, count_include_pad, divisor_override):
    """Return the number of elements each window is averaged over, as a numpy array of the pooled size."""
    if divisor_override:
        return np.asarray(divisor_override)
    counts = np.ones((), np.int64)
    for length, size, k, s, p in zip(spatial, sizes, kernel, stride, padding, strict=True):
        start = np.arange(size) * s - p
        end = np.minimum(start + k, length + p)
        if not count_include_pad:
            start, end = np.maximum(start, 0), np.minimum(end, length)
        counts = counts[..., None] * (end - start)
    return counts


def _avg_pool(n):
    """Return the rules of ``avg_pool{n}d`` and of its gradient."""

    def forward(
        out, x, kernel_size, stride=(), padding=(0,), ceil_mode=False, count_include_pad=True, divisor_override=None
    ):
        kernel, stride, padding = _window(kernel_size, stride, padding, n)
        sizes = out.shape[-n:]
        divisor = _divisors(x.shape[-n:], sizes, kernel, stride, padding, count_include_pad, divisor_override)
        dtype = compute_dtype(x.dtype)
        total = _window_sum(x.astype(dtype), sizes, kernel, stride, padding)
        if jnp.issubdtype(dtype, jnp.integer):
            return lax.div(total, jnp.broadcast_to(jnp.asarray(divisor, dtype), total.shape))
        return (total / jnp.asarray(divisor, dtype)).astype(out.dtype)

    def backward(out, grad, x, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override):
        kernel, stride, padding = _window(kernel_size, stride, padding, n)
        sizes = grad.shape[-n:]
        divisor = _divisors(out.shape[-n:], sizes, kernel, stride, padding, count_include_pad, divisor_override)
        dtype = compute_dtype(grad.dtype)
        share = grad.astype(dtype) / jnp.asarray(divisor, dtype)
        wide = jax.ShapeDtypeStruct(out.shape, dtype)
        spread = jax.linear_transpose(lambda x: _window_sum(x, sizes, kernel, stride, padding), wide)
        return spread(share)[0].astype(out.dtype)

    return forward, backward


def _max_pool(n):
    """Return the rules of ``max_pool{n}d_with_indices`` and of its gradient."""

    def forward(out, x, kernel_size, stride=(), padding=(0,), dilation=(1,), ceil_mode=False):
        return _maxima(out, x, n, kernel_size, stride, padding, dilation)

    def backward(out, grad, x, kernel_size, stride, padding, dilation, ceil_mode, indices):
        return _gradient_of_maxima(out, grad, indices, n, kernel_size, stride, padding, dilation)

    return forward, backward


for _name, _rules in (("max_pool{}d_with_indices", _max_pool), ("avg_pool{}d", _avg_pool)):
    for _n in (2, 3):
        for _suffix, _rule in zip(("", "_backward"), _rules(_n), strict=True):
            lowers(getattr(aten, _name.format(_n) + _suffix).default)(_rule)
