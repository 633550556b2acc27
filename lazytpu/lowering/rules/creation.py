"""Tensors made from sizes and numbers: fills, ranges, triangles, windows."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from lazytpu.lowering.registry import lowers, lowers_each
from lazytpu.lowering.support.operands import cast, is_complex, is_floating, spread

aten = torch.ops.aten


def _zeros(out, *_, **__):
    return lax.full(out.shape, 0, out.dtype)


def _ones(out, *_, **__):
    return lax.full(out.shape, 1, out.dtype)


CONSTANTS = {_zeros, _ones}  # rules whose results depend on their type alone; a program makes each once


def _fill(out, value):
    return spread(cast(value, out.dtype), out.shape)


lowers_each(
    {
        # what `empty` holds is undefined in torch; zeros are reproducible and XLA drops them where unused
        aten.empty.memory_format: _zeros,
        aten.empty_strided.default: _zeros,
        aten.empty_like.default: _zeros,
        aten.empty_permuted.default: _zeros,
        aten.new_empty.default: _zeros,
        aten.new_empty_strided.default: _zeros,
        aten.zeros.default: _zeros,
        aten.zeros_like.default: _zeros,
        aten.new_zeros.default: _zeros,
        aten.zero.default: _zeros,
        aten._efficientzerotensor.default: _zeros,
        aten.ones.default: _ones,
        aten.ones_like.default: _ones,
        aten.new_ones.default: _ones,
        aten.full.default: lambda out, size, value, **_: _fill(out, value),
        aten.full_like.default: lambda out, x, value, **_: _fill(out, value),
        aten.new_full.default: lambda out, x, size, value, **_: _fill(out, value),
        aten.fill.Scalar: lambda out, x, value: _fill(out, value),
        aten.fill.Tensor: lambda out, x, value: _fill(out, value),
        aten.scalar_tensor.default: lambda out, value, **_: _fill(out, value),
    }
)


@lowers(aten.arange.start_step, aten.range.step)
def arange(out, start, end, step=1, **_):
    wide = jnp.float64 if is_floating(out.dtype) else jnp.int64
    return cast(cast(start, wide) + lax.iota(wide, out.shape[0]) * cast(step, wide), out.dtype)


lowers_each(
    {
        aten.arange.default: lambda out, end, **_: arange(out, 0, end),
        aten.arange.start: lambda out, start, end, **_: arange(out, start, end),
        aten.range.default: lambda out, start, end, **_: arange(out, start, end),
    }
)


def _evenly(out, start, end, dtype):
    """Return ``out.shape[0]`` numbers from ``start`` to ``end``; each half counts from its own end, as eager does."""
    steps = out.shape[0]
    if steps <= 1:
        return spread(cast(start, dtype), out.shape)
    start, end = (cast(cast(x, out.dtype), dtype) for x in (start, end))
    # XLA would multiply by the inverse of a constant, and 1/49 * 49 is not 1.
    step = (end - start) / lax.optimization_barrier(jnp.asarray(steps - 1, dtype))
    i = lax.iota(jnp.int32, steps)
    return jnp.where(i < steps // 2, start + step * i.astype(dtype), end - step * (steps - 1 - i).astype(dtype))


def _range_dtype(out):
    """Integers and floats are spaced in float64, complex numbers in their own type."""
    return out.dtype if is_complex(out.dtype) else np.dtype("float64")


@lowers(*(getattr(aten.linspace, name) for name in ("default", "Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor")))
def linspace(out, start, end, steps, **_):
    return cast(_evenly(out, start, end, _range_dtype(out)), out.dtype)


@lowers(
    *(getattr(aten.logspace, name) for name in ("default", "Tensor_Tensor", "Tensor_Scalar", "Scalar_Tensor")),
    dynamic="base",
)
def logspace(out, start, end, steps, base=10.0, **_):
    exponents = _evenly(out, start, end, _range_dtype(out))
    return cast(lax.pow(spread(cast(base, exponents.dtype), out.shape), exponents), out.dtype)


@lowers(aten.eye.default, aten.eye.m)
def eye(out, *_, **__):
    row, column = (lax.broadcasted_iota(jnp.int32, out.shape, i) for i in (0, 1))
    return cast(lax.eq(row, column), out.dtype)


def _triangle_indices(out, first, count):
    """Return row and column of each element of a triangle: row r has ``count[r]`` elements from column ``first[r]``."""
    ends = np.cumsum(count)
    i = lax.iota(jnp.int64, out.shape[1])
    row = jnp.searchsorted(jnp.asarray(ends), i, side="right")
    column = i - jnp.asarray(ends - count - first)[row]
    return cast(jnp.stack([row.astype(jnp.int64), column]), out.dtype)


@lowers(aten.tril_indices.default)
def tril_indices(out, row, col, offset=0, **_):
    if 0 in out.shape:
        return lax.full(out.shape, 0, out.dtype)
    return _triangle_indices(out, 0, np.clip(np.arange(row) + offset + 1, 0, col))


@lowers(aten.triu_indices.default)
def triu_indices(out, row, col, offset=0, **_):
    if 0 in out.shape:
        return lax.full(out.shape, 0, out.dtype)
    first = np.clip(np.arange(row) + offset, 0, col)
    return _triangle_indices(out, first, col - first)


def _within(shape, diagonal):
    """Return a diagonal that i32 holds: one beyond all elements is as good as any other there."""
    most = max(shape[-2:]) + 1
    return max(-most, min(most, diagonal)) if isinstance(diagonal, int) else jnp.clip(diagonal, -most, most)


def _below(shape, diagonal):
    """Where column - row <= diagonal."""
    row, column = (lax.broadcasted_iota(jnp.int32, shape[-2:], i) for i in (0, 1))
    return spread(lax.le(column - row, lax.full(shape[-2:], cast(diagonal, jnp.int32))), shape)


@lowers(aten.tril.default, dynamic="diagonal")
def tril(out, x, diagonal=0):
    return lax.select(_below(x.shape, _within(x.shape, diagonal)), x, lax.full_like(x, 0))


@lowers(aten.triu.default, dynamic="diagonal")
def triu(out, x, diagonal=0):
    return lax.select(_below(x.shape, _within(x.shape, diagonal) - 1), lax.full_like(x, 0), x)


def _angles(out, periodic):
    """Return 2 pi i / N for the elements i of a window of N samples (N - 1 when it is symmetric)."""
    size = out.shape[0]
    return lax.iota(jnp.float64, size) * (2 * math.pi / max(size - (not periodic), 1))


def _cosines(out, periodic, *weights):
    """Return a window that is a sum of cosines with alternating signs."""
    if out.shape[0] == 1:
        return lax.full(out.shape, 1, out.dtype)
    angle = _angles(out, periodic)
    return cast(sum((-1) ** k * w * lax.cos(k * angle) for k, w in enumerate(weights)), out.dtype)


def _triangle(out, periodic=True):
    if out.shape[0] == 1:
        return lax.full(out.shape, 1, out.dtype)
    return cast(1 - jnp.abs(_angles(out, periodic) / math.pi - 1), out.dtype)


def _kaiser(out, periodic=True, beta=12.0):
    if out.shape[0] == 1:
        return lax.full(out.shape, 1, out.dtype)
    beta = jnp.asarray(beta, jnp.float64)
    bend = beta * jnp.sqrt(jnp.maximum(1 - (_angles(out, periodic) / math.pi - 1) ** 2, 0))
    return cast(lax.bessel_i0e(bend) / lax.bessel_i0e(beta) * lax.exp(bend - beta), out.dtype)


def _hamming(out, periodic=True, alpha=0.54, beta=0.46):
    return _cosines(out, periodic, alpha, beta)


_WINDOWS = {
    aten.hann_window: lambda out, periodic=True: _cosines(out, periodic, 0.5, 0.5),
    aten.hamming_window: _hamming,
    aten.blackman_window: lambda out, periodic=True: _cosines(out, periodic, 0.42, 0.5, 0.08),
    aten.bartlett_window: _triangle,
    aten.kaiser_window: _kaiser,
}
lowers_each(
    {
        getattr(packet, name): lambda out, size, *args, _window=window, **_: _window(out, *args)
        for packet, window in _WINDOWS.items()
        for name in packet.overloads()
        if "out" not in name
    }
)
