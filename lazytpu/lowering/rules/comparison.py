"""Comparisons, logic, bit operations and tests for NaN and infinity."""

from __future__ import annotations

import jax.numpy as jnp
import torch
from jax import lax

from lazytpu.lowering.registry import lowers_each
from lazytpu.lowering.support.operands import cast, operands, pointwise, result_dtype

aten = torch.ops.aten


def _shift_right(x, n):
    unsigned = jnp.issubdtype(x.dtype, jnp.unsignedinteger)
    return lax.shift_right_logical(x, n) if unsigned else lax.shift_right_arithmetic(x, n)


def _compared(fn):
    """Return the rule of a comparison: the operands decide the dtype it is made in, the result is bool."""

    def rule(out, x, y):
        return cast(fn(*operands(out, x, y, dtype=result_dtype(x, y))), out.dtype)

    return rule


def _logical(fn):
    return lambda out, *xs: cast(fn(*operands(out, *xs, dtype=bool)), out.dtype)


lowers_each(
    {
        getattr(getattr(aten, name), overload): _compared(fn)
        for name, fn in {"eq": lax.eq, "ne": lax.ne, "lt": lax.lt, "le": lax.le, "gt": lax.gt, "ge": lax.ge}.items()
        for overload in ("Tensor", "Scalar")
    }
)
lowers_each(
    {
        getattr(getattr(aten, name), overload): pointwise(fn)
        for name, fn in {
            "bitwise_and": lax.bitwise_and,
            "bitwise_or": lax.bitwise_or,
            "bitwise_xor": lax.bitwise_xor,
        }.items()
        for overload in ("Tensor", "Scalar", "Scalar_Tensor")
    }
)
lowers_each(
    {
        getattr(getattr(aten, name), overload): pointwise(fn)
        for name, fn in {
            "bitwise_left_shift": lax.shift_left,
            "__lshift__": lax.shift_left,
            "bitwise_right_shift": _shift_right,
            "__rshift__": _shift_right,
        }.items()
        for overload in ("Tensor", "Tensor_Scalar", "Scalar_Tensor", "Scalar")
        if overload in getattr(aten, name).overloads()
    }
)
lowers_each(
    {
        aten.logical_and.default: _logical(lax.bitwise_and),
        aten.logical_or.default: _logical(lax.bitwise_or),
        aten.logical_xor.default: _logical(lax.bitwise_xor),
        aten.logical_not.default: _logical(lax.bitwise_not),
        aten.isnan.default: lambda out, x: lax.ne(x, x),
        aten.isinf.default: lambda out, x: jnp.isinf(x),
        aten.isfinite.default: lambda out, x: jnp.isfinite(x),
        aten.isposinf.default: lambda out, x: jnp.isposinf(x),
        aten.isneginf.default: lambda out, x: jnp.isneginf(x),
        aten.signbit.default: lambda out, x: jnp.signbit(x) if x.dtype != bool else jnp.zeros(x.shape, bool),
    }
)
