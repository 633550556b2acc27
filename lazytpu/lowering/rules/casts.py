"""Copies, conversions of dtype, and the views between complex and real numbers."""

from __future__ import annotations

import jax.numpy as jnp
import torch
from jax import lax

from lazytpu.lowering.registry import lowers, lowers_each
from lazytpu.lowering.support.operands import cast, is_complex, operand, operands

aten = torch.ops.aten


def _same(out, x, **_):
    return x


def _conj(out, x):
    return lax.conj(x) if is_complex(x.dtype) else x


def _as_real(out, x):
    pair = lax.concatenate([lax.expand_dims(part(x), (x.ndim,)) for part in (lax.real, lax.imag)], x.ndim)
    return cast(pair, out.dtype)


def _as_complex(out, x):
    return lax.complex(*(lax.index_in_dim(cast(x, _part(out)), i, axis=-1, keepdims=False) for i in (0, 1)))


lowers_each(
    {
        aten._to_copy.default: lambda out, x, **_: cast(x, out.dtype),
        aten.clone.default: _same,
        aten.lift.default: _same,
        aten.lift_fresh.default: _same,
        aten.lift_fresh_copy.default: _same,
        aten.contiguous.default: _same,
        aten._conj.default: _conj,
        aten._conj_copy.default: _conj,
        aten._conj_physical.default: _conj,
        aten.conj_physical.default: _conj,
        aten.resolve_conj.default: _same,
        aten.resolve_neg.default: _same,
        aten._neg_view.default: lambda out, x: lax.neg(x),
        aten._neg_view_copy.default: lambda out, x: lax.neg(x),
        aten.real.default: lambda out, x: lax.real(x) if is_complex(x.dtype) else x,
        aten.imag.default: lambda out, x: lax.imag(x),
        aten.view_as_real.default: _as_real,
        aten.view_as_real_copy.default: _as_real,
        aten.view_as_complex.default: _as_complex,
        aten.view_as_complex_copy.default: _as_complex,
    }
)


@lowers(aten.copy.default)
def copy(out, x, source, non_blocking=False):
    return operand(source, out, out.dtype)


def _part(out):
    """Return the real dtype of the complex result."""
    return jnp.finfo(out.dtype).dtype


@lowers(aten.complex.default)
def complex(out, real, imag):
    return lax.complex(*operands(out, real, imag, dtype=_part(out)))


@lowers(aten.polar.default)
def polar(out, length, angle):
    length, angle = operands(out, length, angle, dtype=_part(out))
    return lax.complex(length * lax.cos(angle), length * lax.sin(angle))
