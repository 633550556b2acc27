"""Adaptive and fractional pooling, and unpooling: windows whose bounds differ from place to place."""

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from lazytpu.lowering.registry import lowers_each
from lazytpu.lowering.rules.pooling import _along, _reduce_max, scattered
from lazytpu.lowering.support.operands import compute_dtype

aten = torch.ops.aten


def _bins(length, size):
    """Return the first element and number of elements of each of ``size`` bins over ``length`` elements."""
    i = np.arange(size)
    start = i * length // size
    return start, -((i + 1) * length // -size) - start


def _bin_means(x, sizes):
    """Return the mean over the bins of the last ``len(sizes)`` dimensions."""
    lead = x.ndim - len(sizes)
    for i, size in enumerate(sizes):
        axis = lead + i
        length = x.shape[axis]
        if size and length % size == 0:
            x = jnp.mean(x.reshape(*x.shape[:axis], size, length // size, *x.shape[axis + 1 :]), axis + 1)
            continue
        start, count = _bins(length, size)
        offsets = np.arange(count.max(initial=1))
        at = start[:, None] + np.minimum(offsets, count[:, None] - 1)
        inside = (offsets < count[:, None]).reshape(*at.shape, *[1] * (x.ndim - axis - 1))
        x = jnp.sum(jnp.where(inside, jnp.take(x, at, axis, mode="clip"), 0), axis + 1)
        x = x / jnp.asarray(count, x.dtype).reshape(-1, *[1] * (x.ndim - axis - 1))
    return x


def _adaptive_avg_pool(out, x, n):
    return _bin_means(x.astype(compute_dtype(x.dtype)), out.shape[-n:]).astype(out.dtype)


def _bin_means_backward(out, grad, n):
    wide = jax.ShapeDtypeStruct(out.shape, compute_dtype(out.dtype))
    spread = jax.linear_transpose(lambda x: _bin_means(x, grad.shape[-n:]), wide)
    return spread(grad.astype(wide.dtype))[0].astype(out.dtype)


def _adaptive_max_pool(out, x, n):
    value, index, length = x, None, 1
    for axis in reversed(range(x.ndim - n, x.ndim)):
        start, count = _bins(x.shape[axis], out[0].shape[axis])
        # Short bins see their last element again, which changes neither the maximum nor its place.
        positions = [start + np.minimum(j, count - 1) for j in range(count.max(initial=1))]
        taps = [jnp.take(value, q, axis, mode="clip") for q in positions]
        index = index if index is None else [jnp.take(index, q, axis, mode="clip") for q in positions]
        value, index = _reduce_max(taps, axis, [_along(axis, x.ndim, q) for q in positions], length, index)
        length *= x.shape[axis]
    return value, index.astype(out[1].dtype)


def _fractional_starts(sample, length, size, k):
    """Return window starts drawn from ``sample`` in [0, 1), shape [..., size]; the last window ends with the input."""
    if size == 1:
        return jnp.full((*sample.shape, 1), length - k, jnp.int32)
    alpha = jnp.asarray((length - k) / (size - 1), sample.dtype)
    i = jnp.arange(size - 1, dtype=sample.dtype)
    start = jnp.trunc((i + sample[..., None]) * alpha) - jnp.trunc(sample[..., None] * alpha)
    last = jnp.full((*sample.shape, 1), length - k, jnp.int32)
    return jnp.concatenate([start.astype(jnp.int32), last], -1)


def _fractional_max_pool(out, x, kernel, samples, n):
    """``samples`` is [batch, channel, n]: width first for images, depth first for volumes."""
    lead, value, index, length = x.ndim - n, x, None, 1
    samples = samples.reshape(*((1, 1) + x.shape[:lead])[-lead:], n) if lead == 2 else samples.reshape(x.shape[0], n)
    for i in reversed(range(n)):
        axis, k = lead + i, kernel[i]
        starts = _fractional_starts(samples[..., n - 1 - i if n == 2 else i], x.shape[axis], out[0].shape[axis], k)
        starts = starts.reshape(*x.shape[:lead], *[-1 if j == i else 1 for j in range(n)])
        positions = [starts + j for j in range(k)]
        taps = [jnp.take_along_axis(value, q, axis, mode="clip") for q in positions]
        index = index if index is None else [jnp.take_along_axis(index, q, axis, mode="clip") for q in positions]
        value, index = _reduce_max(taps, axis, positions, length, index)
        length *= x.shape[axis]
    return value, index.astype(out[1].dtype)


def _unpooled(out, x, indices, n):
    lead = out.shape[: len(out.shape) - n]
    planes = int(np.prod(lead))
    rows = lax.broadcasted_iota(jnp.int32, (planes, x.size // max(planes, 1)), 0)
    flat = jnp.zeros((planes, int(np.prod(out.shape[len(lead) :]))), out.dtype)
    return flat.at[rows, indices.reshape(rows.shape)].set(x.reshape(rows.shape)).reshape(out.shape)


def _rules(n):
    """Return the rules of the ops over ``n`` dimensions."""
    return {
        f"_adaptive_avg_pool{n}d": lambda out, x, output_size: _adaptive_avg_pool(out, x, n),
        f"_adaptive_avg_pool{n}d_backward": lambda out, grad, x: _bin_means_backward(out, grad, n),
        f"adaptive_max_pool{n}d": lambda out, x, output_size: _adaptive_max_pool(out, x, n),
        f"adaptive_max_pool{n}d_backward": lambda out, grad, x, indices: scattered(out, grad, indices, n),
        f"fractional_max_pool{n}d": lambda out, x, kernel, size, drawn: _fractional_max_pool(out, x, kernel, drawn, n),
        f"fractional_max_pool{n}d_backward": lambda out, grad, x, kernel, size, at: scattered(out, grad, at, n),
        f"max_unpool{n}d": lambda out, x, indices, *_: _unpooled(out, x, indices, n),
    }


for _n in (2, 3):
    lowers_each({getattr(aten, name).default: rule for name, rule in _rules(_n).items()})
