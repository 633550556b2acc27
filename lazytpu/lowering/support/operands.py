"""Bring the operands of a pointwise op to one dtype and one shape, as eager torch on the CPU does."""

from __future__ import annotations

import functools
import typing
from collections.abc import Callable
from functools import partial, reduce
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from lazytpu import dtypes
from lazytpu.lowering.registry import target_platform

Operand: TypeAlias = jax.Array | bool | int | float | complex
"""An operand of a pointwise op: an array, or a number that the graph has as a constant."""
Dtype: TypeAlias = str | type | np.dtype
Rounding: TypeAlias = Callable[[jax.Array], jax.Array]

_HALF = frozenset(map(np.dtype, (jnp.bfloat16, jnp.float16)))
_NUMBER = frozenset(map(np.dtype, ("float64", "int64", "bool", "complex128")))
_F32, _F64, _BOOL = np.dtype("float32"), np.dtype("float64"), np.dtype("bool")
_F8 = np.dtype(jnp.float8_e4m3fn)


def compute_dtype(dtype: Dtype) -> np.dtype:
    """Return the dtype that eager computes in: float32 for the half types, else the type itself."""
    dtype = np.dtype(dtype)
    return _F32 if dtype in _HALF or dtype.itemsize == 1 and is_floating(dtype) else dtype


def is_floating(dtype: Dtype) -> bool:
    """Return whether ``dtype`` is a real floating type."""
    return bool(jnp.issubdtype(dtype, jnp.floating))


def is_complex(dtype: Dtype) -> bool:
    """Return whether ``dtype`` is a complex type."""
    return bool(jnp.issubdtype(dtype, jnp.complexfloating))


def is_integral(dtype: Dtype) -> bool:
    """Return whether ``dtype`` is an integer type (not bool)."""
    return bool(jnp.issubdtype(dtype, jnp.integer))


def cast(x: Operand, dtype: Dtype) -> jax.Array:
    """Return ``x`` as an array of ``dtype``, with the conversions of eager torch."""
    dtype = np.dtype(dtype)
    if not hasattr(x, "dtype"):
        if dtype == _BOOL and not isinstance(x, complex):
            x = bool(x)
        return jnp.asarray(_wrapped(x, dtype) if isinstance(x, int) and is_integral(dtype) else x, dtype)
    x = typing.cast("jax.Array", x)
    if x.dtype == dtype:
        return x
    if is_complex(x.dtype) and not is_complex(dtype) and dtype != _BOOL:
        x = lax.real(x)
    if dtype == _BOOL:
        return lax.ne(x, lax.full_like(x, 0))
    if is_complex(dtype) and target_platform() == "tpu":  # XLA for TPUs ends the process at what it cannot convert
        parts = (lax.real(x), lax.imag(x)) if is_complex(x.dtype) else (x, lax.full_like(x, 0))
        return lax.complex(*(cast(part, jnp.finfo(dtype).dtype) for part in parts))
    if x.dtype == _BOOL and not is_integral(dtype):
        x = lax.convert_element_type(x, np.uint8)  # XLA makes a select of convert(bool) * y, which hides 0 * NaN
    if is_floating(x.dtype) and is_integral(dtype) and dtype.itemsize <= 2:
        x = lax.convert_element_type(x, np.int64)  # C casts through a wider integer, so it wraps; XLA would saturate
    if dtype == _F8 and _saturates():
        x = lax.convert_element_type(x, np.float32)
        x = lax.max(lax.min(x, lax.full_like(x, 448)), lax.full_like(x, -448))  # NaN stays NaN
    return lax.convert_element_type(x, dtype)


@functools.cache
def _saturates() -> bool:
    """Return whether torch gives the largest float8_e4m3fn, which has no infinity, where XLA gives NaN: since 2.13."""
    return not torch.full((), 1e4, device="cpu").to(torch.float8_e4m3fn).float().isnan().item()


def _wrapped(x: int, dtype: np.dtype) -> np.ndarray:
    """Return a number in an integer ``dtype``, modulo its range, as one is wrapped that is an input of the graph."""
    return np.asarray(x % (1 << 8 * dtype.itemsize), f"u{dtype.itemsize}").view(dtype)


def spread(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return ``x`` broadcast to ``shape``."""
    if x.shape == tuple(shape):
        return x
    lead = len(shape) - x.ndim
    stretched = [i for i, n in enumerate(x.shape) if n == 1 and shape[lead + i] != 1]
    kept = [i for i in range(x.ndim) if i not in stretched]
    if stretched:
        x = lax.squeeze(x, stretched)
    return lax.broadcast_in_dim(x, shape, [lead + i for i in kept])


def operand(x: Operand, out: jax.ShapeDtypeStruct, dtype: Dtype | None = None) -> jax.Array:
    """Return ``x`` in the dtype that ``out`` is computed in (or ``dtype``) and in its shape.

    Without ``dtype`` it has the values of the dtype of ``out``: eager makes halves of numbers and wider tensors first.
    """
    if dtype is None:
        dtype = compute_dtype(out.dtype)
        if out.dtype in _HALF and getattr(x, "dtype", None) != out.dtype:
            x = rounded(cast(x, dtype), out.dtype)
    return spread(cast(x, dtype), out.shape)


def operands(out: jax.ShapeDtypeStruct, *xs: Operand, dtype: Dtype | None = None) -> list[jax.Array]:
    """Return each of ``xs`` as ``operand`` does."""
    return [operand(x, out, dtype) for x in xs]


def rounded(x: jax.Array, dtype: Dtype) -> jax.Array:
    """Return ``x`` with the values that the floating ``dtype`` can hold; XLA would leave out a cast back and forth."""
    if x.dtype == dtype:
        return x
    if dtype == jnp.float16:
        return _rounded_to_float16(x)
    if x.dtype == _F64 and target_platform() == "tpu":  # has no such instruction of 64 bits
        return cast(lax.optimization_barrier(cast(x, dtype)), _F64)
    info = jnp.finfo(dtype)
    return lax.reduce_precision(x, info.nexp, info.nmant)


@jax.custom_vjp
def _rounded_to_float16(x: jax.Array) -> jax.Array:
    """Round below the smallest normal number too, where XLA has zero and float16 steps of 2 ** -24."""
    tiny, step = lax.full_like(x, 2.0**-14), lax.full_like(x, 2.0**-24)
    whole = lax.round(x / step, lax.RoundingMethod.TO_NEAREST_EVEN) * step
    return lax.select(lax.lt(lax.abs(x), tiny), whole, lax.reduce_precision(x, 5, 10))


_rounded_to_float16.defvjp(lambda x: (_rounded_to_float16(x), None), lambda _, grad: (_rounded_to_float16(grad),))


def rounding(dtype: Dtype | None) -> Rounding:
    """Return what eager does to the result of each step of a formula that it computes in the half type ``dtype``."""
    return partial(rounded, dtype=dtype) if dtype in _HALF else lambda x: x


def as_computed(x: jax.Array) -> jax.Array:
    """Return ``x`` such that XLA does not look behind it, at what it was computed from.

    XLA would make ``x`` of ``log(exp(x))``, and ``abs(x)`` of ``sqrt(x * x)``, also where ``exp(x)`` and ``x * x``
    overflow.  It does not look behind a reduction to a higher precision than the type has, for which it makes no code.
    """
    if not is_floating(x.dtype):
        return x
    if x.dtype == _F64 and target_platform() == "tpu":
        barred: jax.Array = lax.optimization_barrier(x)
        return barred
    info = jnp.finfo(x.dtype)
    return lax.reduce_precision(x, info.nexp, info.nmant + 1)


def rounded_as_is(x: jax.Array) -> jax.Array:
    """Return ``x`` such that LLVM makes no instruction that computes it and adds to it at once."""
    return lax.select(lax.eq(x, x), x, lax.full_like(x, jnp.nan))


def quotient(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return ``x / y``, rounded once.

    XLA multiplies by the inverse where the divisor is one number for the whole array, so that 41 / 41 is less than 1.
    A divisor that depends on ``x``, if only to be NaN where ``x`` is and the result anyway, it divides by.
    """
    if x.dtype not in (_F32, _F64):
        return lax.div(x, y)
    return as_computed(lax.div(x, lax.select(lax.eq(x, x), y, x)))


def pointwise(fn: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Return the rule that computes ``fn`` of all its operands in the dtype of the result."""

    def rule(out: jax.ShapeDtypeStruct, *xs: Operand) -> jax.Array:
        return cast(fn(*operands(out, *xs)), out.dtype)

    return rule


def _kind(dtype: torch.dtype) -> int:
    return 3 if dtype.is_complex else 2 if dtype.is_floating_point else 1 if dtype != torch.bool else 0


def _join(a: torch.dtype | None, b: torch.dtype) -> torch.dtype:
    return b if a is None else torch.promote_types(a, b)


def result_dtype(*xs: Operand) -> np.dtype:
    """Return the dtype in which eager compares ``xs``: tensors first, then 0-d tensors, then numbers.

    A 0-d array of f64, i64, bool or c128 may be a number the user wrote or a tensor; it is taken for a number
    of the default width where that makes a difference between float types.
    """
    groups: list[list[torch.dtype]] = [[], [], []]
    for x in xs:
        given = np.dtype(x.dtype if isinstance(x, jax.Array) else np.asarray(x).dtype)
        rank = 0 if getattr(x, "ndim", 0) else 2 if given in _NUMBER else 1
        groups[rank].append(dtypes.to_torch(given))
    result = reduce(_join, groups[0], None) if groups[0] else None
    for group in groups[1:]:
        if not group:
            continue
        dtype = reduce(torch.promote_types, group)
        if result is None:
            result = dtype
        elif _kind(dtype) > _kind(result):
            number = {torch.float64: torch.float32, torch.complex128: torch.complex64}.get(dtype, dtype)
            result = torch.promote_types(result, number)
        elif not groups[0] and _kind(dtype) == _kind(result) == 1:
            result = torch.promote_types(result, dtype)
    assert result is not None
    return dtypes.to_numpy(result)
