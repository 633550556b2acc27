"""Tensors made from sizes and numbers: fills, ranges, triangles."""

from __future__ import annotations

import jax.numpy as jnp
import torch
from jax import lax

from lazytpu.lowering.registry import lowers, lowers_each
from lazytpu.lowering.rules.operands import cast, is_floating, spread

aten = torch.ops.aten


def _filled(value):
    return lambda out, *_, **__: lax.full(out.shape, value, out.dtype)


def _fill(out, value):
    return spread(cast(value, out.dtype), out.shape)


lowers_each(
    {
        # what `empty` holds is undefined in torch; zeros are reproducible and XLA drops them where unused
        aten.empty.memory_format: _filled(0),
        aten.empty_strided.default: _filled(0),
        aten.empty_like.default: _filled(0),
        aten.empty_permuted.default: _filled(0),
        aten.new_empty.default: _filled(0),
        aten.new_empty_strided.default: _filled(0),
        aten.zeros.default: _filled(0),
        aten.zeros_like.default: _filled(0),
        aten.new_zeros.default: _filled(0),
        aten.ones.default: _filled(1),
        aten.ones_like.default: _filled(1),
        aten.new_ones.default: _filled(1),
        aten.zero.default: _filled(0),
        aten.full.default: lambda out, size, value, **_: _fill(out, value),
        aten.full_like.default: lambda out, x, value, **_: _fill(out, value),
        aten.new_full.default: lambda out, x, size, value, **_: _fill(out, value),
        aten.fill.Scalar: lambda out, x, value: _fill(out, value),
        aten.fill.Tensor: lambda out, x, value: _fill(out, value),
        aten.scalar_tensor.default: lambda out, value, **_: _fill(out, value),
    }
)


@lowers(aten.arange.start_step)
def arange(out, start, end, step=1, **_):
    wide = jnp.float64 if is_floating(out.dtype) else jnp.int64
    return cast(cast(start, wide) + lax.iota(wide, out.shape[0]) * cast(step, wide), out.dtype)


lowers_each(
    {
        aten.arange.default: lambda out, end, **_: arange(out, 0, end),
        aten.arange.start: lambda out, start, end, **_: arange(out, start, end),
    }
)


def _below(shape, diagonal):
    """Where column - row <= diagonal."""
    row, column = (lax.broadcasted_iota(jnp.int32, shape[-2:], i) for i in (0, 1))
    return spread(lax.le(column - row, lax.full(shape[-2:], cast(diagonal, jnp.int32))), shape)


@lowers(aten.tril.default, dynamic="diagonal")
def tril(out, x, diagonal=0):
    return lax.select(_below(x.shape, diagonal), x, lax.full_like(x, 0))


@lowers(aten.triu.default, dynamic="diagonal")
def triu(out, x, diagonal=0):
    return lax.select(_below(x.shape, diagonal - 1), lax.full_like(x, 0), x)
