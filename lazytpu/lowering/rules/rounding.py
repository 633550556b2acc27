"""Rounding to whole numbers, or to a number of decimals."""

from __future__ import annotations

import jax.numpy as jnp
import torch
from jax import lax

from lazytpu.lowering.registry import lowers_each
from lazytpu.lowering.support.operands import cast, is_floating, operand, pointwise

aten = torch.ops.aten


def _of_floats(fn):
    return pointwise(lambda x: fn(x) if is_floating(x.dtype) else x)


def _round(out, x, *, decimals=0):
    if not is_floating(out.dtype):
        return x
    x = operand(x, out)
    if decimals == 0:
        return cast(lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN), out.dtype)
    ten = 10.0 ** abs(decimals)
    scaled = x * ten if decimals > 0 else x / ten
    whole = lax.round(scaled, lax.RoundingMethod.TO_NEAREST_EVEN)
    return cast(whole / ten if decimals > 0 else whole * ten, out.dtype)


lowers_each(
    {
        aten.floor.default: _of_floats(lax.floor),
        aten.ceil.default: _of_floats(lax.ceil),
        aten.trunc.default: _of_floats(jnp.trunc),
        aten.round.default: _round,
        aten.round.decimals: _round,
        aten.frac.default: pointwise(lambda x: x - jnp.trunc(x)),
    }
)
