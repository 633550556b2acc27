"""Arithmetic, elementary functions, selection and clamping, most of them one line an op."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from lazytpu.lowering.registry import lowers, lowers_each
from lazytpu.lowering.support import complex_functions
from lazytpu.lowering.support.complex_functions import product, quotient
from lazytpu.lowering.support.operands import (
    as_computed,
    cast,
    compute_dtype,
    is_complex,
    is_floating,
    operand,
    operands,
    pointwise,
    rounding,
    spread,
)

aten = torch.ops.aten
_BOUNDS_FIT = torch.__version__ >= "2.15"


def _is_one(x):
    """Return whether a scalar is the Python number 1 (an array's value is not known here)."""
    return not hasattr(x, "dtype") and x == 1


def _scaled(x, alpha):
    if is_complex(x.dtype) and _is_one(alpha):  # by one and no i, as the CPU does: inf becomes inf + nan i
        return lax.complex(lax.real(x) - lax.imag(x) * 0, lax.imag(x) + lax.real(x) * 0)
    return x if _is_one(alpha) else product(x, spread(cast(alpha, x.dtype), x.shape))


def _by_number(result, y):
    """Return the result of an operand and ``y``; XLA would join two constants of a row, as in ``x + 1 - 1``."""
    return result if hasattr(y, "dtype") else as_computed(result)


def _alpha(alpha, out):
    return alpha if _is_one(alpha) else rounding(out.dtype)(cast(alpha, compute_dtype(out.dtype)))


@lowers(aten.add.Tensor, aten.add.Scalar)
def add(out, x, y, alpha=1):
    given, (x, y) = y, operands(out, x, y)
    if out.dtype == bool:
        return lax.bitwise_or(x, y if _is_one(alpha) else lax.bitwise_and(y, operand(alpha, out)))
    return cast(_by_number(lax.add(x, _scaled(y, _alpha(alpha, out))), given), out.dtype)


@lowers(aten.sub.Tensor, aten.sub.Scalar)
def sub(out, x, y, alpha=1):
    given, (x, y) = y, operands(out, x, y)
    return cast(_by_number(lax.sub(x, _scaled(y, _alpha(alpha, out))), given), out.dtype)


@lowers(aten.rsub.Tensor, aten.rsub.Scalar)
def rsub(out, x, y, alpha=1):
    return _by_number(sub(out, y, x, alpha), y)


def _factor(x, out):
    """Return the second operand of a product or quotient; one number counts as it is, and is not made a half first."""
    return operand(x, out, compute_dtype(out.dtype) if getattr(x, "size", 1) == 1 else None)


@lowers(aten.mul.Tensor, aten.mul.Scalar)
def mul(out, x, y):
    x, factor = operand(x, out), _factor(y, out)
    return lax.bitwise_and(x, factor) if out.dtype == bool else cast(_by_number(product(x, factor), y), out.dtype)


def _floor_quotient(x, y, r):
    """Return the floor of x / y as Python's divmod and eager do, exact where x / y is not; ``r`` rounds steps."""
    if not is_floating(x.dtype):
        near = lax.div(x, y)
        inexact = lax.ne(lax.mul(near, y), x)
        opposite = lax.ne(lax.lt(x, lax.full_like(x, 0)), lax.lt(y, lax.full_like(y, 0)))
        return jnp.where(inexact & opposite, near - 1, near).astype(x.dtype)
    rest = lax.rem(x, y)
    near = r(quotient(r(x - rest), y))
    near = jnp.where((rest != 0) & ((y < 0) != (rest < 0)), r(near - 1), near)
    whole = jnp.floor(near)
    whole = jnp.where(r(near - whole) > 0.5, r(whole + 1), whole)
    whole = jnp.where(near == 0, jnp.copysign(jnp.zeros((), x.dtype), x / y), whole)
    return jnp.where(y == 0, x / y, whole)


@lowers(aten.div.Tensor, aten.div.Scalar, aten.div.Tensor_mode, aten.div.Scalar_mode)
def div(out, x, y, rounding_mode=None):
    r = rounding(out.dtype if getattr(y, "size", 1) != 1 else None)  # by one number eager divides in float32
    x, y = operand(x, out), _factor(y, out)
    if rounding_mode == "floor":
        return cast(_floor_quotient(x, y, r), out.dtype)
    if rounding_mode == "trunc" and is_floating(out.dtype):
        return cast(jnp.trunc(r(quotient(x, y))), out.dtype)
    return cast(quotient(x, y), out.dtype)


@lowers(aten.floor_divide.default, aten.floor_divide.Scalar)
def floor_divide(out, x, y):
    return div(out, x, y, "floor")


def _remainder(x, y):
    rest = lax.rem(x, y)
    return jnp.where((rest != 0) & ((rest < 0) != (y < 0)), rest + y, rest)


lowers(aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor)(pointwise(_remainder))
lowers(aten.fmod.Tensor, aten.fmod.Scalar)(pointwise(lax.rem))


def _gcd(x, y):
    """Run Euclid's algorithm with C's remainder, as eager does: it ends for the least integer too, which has no abs."""

    def step(state):
        a, b = state
        return jnp.where(a == 0, 0, lax.rem(b, jnp.where(a == 0, 1, a))), jnp.where(a == 0, b, a)

    return lax.while_loop(lambda state: jnp.any(state[0] != 0), step, (jnp.abs(x), jnp.abs(y)))[1]


def _lcm(x, y):
    divisor = _gcd(x, y)
    small = x.dtype.itemsize < 4  # which C computes as int
    x, y, divisor = (a.astype(jnp.int32) if small else a for a in (x, y, divisor))
    return jnp.abs(lax.div(x, jnp.where(divisor == 0, 1, divisor)) * y)


def _integer_pow(x, n):
    """Return x ** n for integers that wrap around; negative exponents give 0 except for bases 1 and -1."""
    one = lax.full_like(x, 1)

    def step(state):
        result, base, left = state
        return jnp.where(left & 1 == 1, result * base, result), base * base, left >> 1

    power, _, _ = lax.while_loop(lambda s: jnp.any(s[2] > 0), step, (one, x, n))
    if jnp.issubdtype(x.dtype, jnp.unsignedinteger):
        return power
    odd = jnp.where(n & 1 == 1, x, one)
    return jnp.where(n >= 0, power, jnp.where(abs(x) == 1, odd, jnp.zeros_like(x)))


def _fixed_pow(x, n, dtype):
    """Return x ** n, to be rounded to ``dtype``, for an exponent eager has a shorter form for, else None."""
    if dtype == jnp.float16 and n in (0.5, -0.5):
        return None
    if n in (1, 2, 3) or n == 4 and not is_complex(x.dtype):
        return complex_functions.integer_power(x, int(n.real))
    if not (is_floating(x.dtype) or is_complex(x.dtype)):
        return None
    if n in (0.5, -0.5):
        root = complex_functions.sqrt(as_computed(x))
        return root if n == 0.5 else as_computed(complex_functions.reciprocal(root))
    if n not in (-1, -2):
        return None
    return as_computed(complex_functions.reciprocal(complex_functions.integer_power(x, int(-n.real))))


@lowers(aten.pow.Tensor_Scalar, dynamic="exponent")
def pow_scalar(out, x, n):
    x = operand(x, out)
    if not hasattr(n, "dtype"):
        power = None if out.dtype == bool else _fixed_pow(x, n, out.dtype)
        if n == 0 and is_complex(x.dtype):
            return lax.full_like(x, 1)
        return pow(out, x, n) if power is None else cast(power, out.dtype)
    power = pow(out, x, n)
    if is_complex(x.dtype):
        return jnp.where(n == 0, cast(1, out.dtype), power)
    if not is_floating(x.dtype) or out.dtype == jnp.float16:
        return power
    root = jnp.where(x == 0, x, jnp.nan)  # eager takes square roots, which differ from powers at -0 and -inf
    of_root = (abs(n) == 0.5) & ((x == 0) | (x == -jnp.inf))
    return jnp.where(of_root, cast(jnp.where(n > 0, root, 1 / root), out.dtype), power)


@lowers(aten.pow.Tensor_Tensor, aten.pow.Scalar, dynamic="exponent")
def pow(out, x, n):
    x = operand(x, out)
    if out.dtype == bool:
        return x | ~operand(n, out)
    n = operand(n, out)
    if is_floating(x.dtype):
        return cast(as_computed(lax.pow(x, n)), out.dtype)
    return cast(complex_functions.power(x, n) if is_complex(x.dtype) else _integer_pow(x, n), out.dtype)


def sign(x):
    """Return the sign, 0 for NaN."""
    if is_complex(x.dtype):
        return complex_functions.sgn(x)
    return cast(x > 0, x.dtype) - cast(x < 0, x.dtype) if x.dtype != bool else x


def _abs(out, x):
    if out.dtype == bool or jnp.issubdtype(x.dtype, jnp.unsignedinteger):
        return x
    if is_complex(x.dtype):
        return cast(complex_functions.absolute(x), out.dtype)
    if jnp.issubdtype(x.dtype, jnp.signedinteger):
        return lax.select(lax.lt(x, lax.full_like(x, 0)), lax.neg(x), x)  # XLA takes its own ``abs`` for never negative
    return cast(lax.abs(cast(x, compute_dtype(x.dtype))), out.dtype)


def _ldexp(out, x, n):
    """Return ``x * 2 ** n``; the power is rounded to the type torch gives it."""
    kept = n.dtype if jnp.issubdtype(n.dtype, jnp.inexact) else jnp.dtype(jnp.float32)
    n = cast(n, compute_dtype(kept))
    power = complex_functions.power if is_complex(kept) else lax.pow
    return mul(out, x, cast(power(lax.full_like(n, 2), n), kept))


def times_log(log):
    """Return the rule of ``x * log(y)``, 0 where x is 0 and y a number."""

    def rule(out, x, y):
        x, y = operands(out, x, y)
        return cast(jnp.where(y != y, y, jnp.where(x == 0, jnp.zeros((), x.dtype), x * log(y))), out.dtype)

    return rule


lowers_each(
    {
        aten.neg.default: pointwise(lax.neg),
        aten.positive.default: lambda out, x: x,
        aten.abs.default: _abs,
        aten.sign.default: pointwise(sign),
        aten.sgn.default: pointwise(sign),
        aten.reciprocal.default: pointwise(lambda x: as_computed(complex_functions.reciprocal(x))),
        aten.square.default: pointwise(lambda x: product(x, x)),
        aten.sqrt.default: pointwise(lambda x: complex_functions.sqrt(as_computed(x))),
        aten.rsqrt.default: pointwise(
            lambda x: as_computed(complex_functions.reciprocal(complex_functions.sqrt(as_computed(x))))
        ),
        aten.exp.default: pointwise(lambda x: as_computed(complex_functions.exp(x))),
        aten.exp2.default: pointwise(lambda x: as_computed(complex_functions.exp2(x))),
        aten.expm1.default: pointwise(complex_functions.expm1),
        aten.log.default: pointwise(complex_functions.log),
        aten.log1p.default: pointwise(complex_functions.log1p),
        aten.log2.default: pointwise(complex_functions.log2),
        aten.log10.default: pointwise(complex_functions.log10),
        aten.sin.default: pointwise(complex_functions.sin),
        aten.cos.default: pointwise(complex_functions.cos),
        aten.tan.default: pointwise(complex_functions.tan),
        aten.asin.default: pointwise(complex_functions.asin),
        aten.acos.default: pointwise(complex_functions.acos),
        aten.atan.default: pointwise(complex_functions.atan),
        aten.sinh.default: pointwise(complex_functions.sinh),
        aten.cosh.default: pointwise(complex_functions.cosh),
        aten.asinh.default: pointwise(complex_functions.asinh),
        aten.acosh.default: pointwise(complex_functions.acosh),
        aten.atanh.default: pointwise(complex_functions.atanh),
        aten.atan2.default: pointwise(lax.atan2),
        aten.maximum.default: pointwise(lax.max),
        aten.minimum.default: pointwise(lax.min),
        aten.fmax.default: pointwise(jnp.fmax),
        aten.fmin.default: pointwise(jnp.fmin),
        aten.hypot.default: pointwise(jnp.hypot),
        aten.gcd.default: pointwise(_gcd),
        aten.lcm.default: pointwise(_lcm),
        aten.sinc.default: pointwise(jnp.sinc),
        aten.deg2rad.default: pointwise(lambda x: x * (math.pi / 180)),
        aten.rad2deg.default: pointwise(lambda x: x * (180 / math.pi)),
        aten.logaddexp.default: pointwise(complex_functions.logaddexp),
        aten.logaddexp2.default: pointwise(jnp.logaddexp2),
        aten.heaviside.default: pointwise(lambda x, at_zero: jnp.where(x == 0, at_zero, cast(x > 0, x.dtype))),
        aten.nextafter.default: lambda out, x, y: lax.nextafter(*operands(out, x, y, dtype=out.dtype)),
        aten.copysign.Tensor: pointwise(jnp.copysign),
        aten.copysign.Scalar: pointwise(jnp.copysign),
        aten.xlogy.Tensor: times_log(lax.log),
        aten.xlogy.Scalar_Other: times_log(lax.log),
        aten.xlogy.Scalar_Self: times_log(lax.log),
        aten.ldexp.Tensor: _ldexp,
        aten.bitwise_not.default: pointwise(lax.bitwise_not),
    }
)


@lowers(aten.angle.default)
def angle(out, x):
    if is_complex(x.dtype):
        return cast(lax.atan2(lax.imag(x), lax.real(x)), out.dtype)
    x = operand(x, out)
    half_turn = jnp.where(x < 0, cast(math.pi, x.dtype), cast(0, x.dtype))
    return cast(jnp.where(x != x, x, half_turn), out.dtype)


@lowers(aten.frexp.Tensor)
def frexp(out, x):
    mantissa, exponent = jnp.frexp(operand(x, out[0]))
    return cast(mantissa, out[0].dtype), cast(exponent, out[1].dtype)


@lowers(aten.logit.default, dynamic="eps")
def logit(out, x, eps=None):
    x = operand(x, out)
    if eps is not None:
        eps = operand(eps, out)
        x = jnp.where(eps < 0, x, jnp.where(x < eps, eps, lax.min(x, 1 - eps)))  # an eps above 1/2 is a floor
    return cast(lax.log(x / (1 - x)), out.dtype)


@lowers(aten.logit_backward.default, dynamic="eps")
def logit_backward(out, grad, x, eps=None):
    grad, x, eps = operands(out, grad, x, -1.0 if eps is None else eps)
    outside = jnp.where(eps < 0, cast(math.nan, x.dtype), cast(0, x.dtype))
    low = lax.max(eps, lax.full_like(x, 0))
    return cast(jnp.where((x < low) | (x > 1 - low), outside, grad / (lax.abs(x) * (1 - x))), out.dtype)


@lowers(aten.where.self)
def where(out, condition, x, y):
    return lax.select(operand(condition, out, bool), *operands(out, x, y, dtype=out.dtype))


def _bound(y, out):
    """Return a bound in the type of the elements: one beyond them is their least or greatest since torch 2.15."""
    if _BOUNDS_FIT and jnp.issubdtype(out.dtype, jnp.integer):
        limits = jnp.iinfo(out.dtype)
        y = jnp.clip(jnp.asarray(y), limits.min, limits.max)
    return operand(y, out)


@lowers(aten.clamp.default, aten.clamp.Tensor)
def clamp(out, x, min=None, max=None):
    x = operand(x, out)
    if min is not None:
        x = lax.max(x, _bound(min, out))
    return cast(x if max is None else lax.min(x, _bound(max, out)), out.dtype)


lowers_each(
    {
        aten.clamp_min.default: lambda out, x, min: clamp(out, x, min),
        aten.clamp_min.Tensor: lambda out, x, min: clamp(out, x, min),
        aten.clamp_max.default: lambda out, x, max: clamp(out, x, None, max),
        aten.clamp_max.Tensor: lambda out, x, max: clamp(out, x, None, max),
    }
)


@lowers(aten.lerp.Scalar, aten.lerp.Tensor)
def lerp(out, start, end, weight):
    start, end = operand(start, out), operand(end, out)
    one = getattr(weight, "size", 1) == 1
    weight = cast(jnp.reshape(weight, ()), start.dtype) if one else operand(weight, out)
    small = lax.lt(lax.abs(weight), cast(0.5, jnp.abs(weight).dtype))  # from the nearer end, where it is exact
    factor = spread(lax.select(small, weight, weight - 1), out.shape)
    return cast(lax.select(spread(small, out.shape), start, end) + factor * (end - start), out.dtype)


@lowers(aten.addcmul.default)
def addcmul(out, x, a, b, *, value=1):
    x, a, b = operands(out, x, a, b)
    return cast(lax.add(x, _scaled(product(a, b), value)), out.dtype)


@lowers(aten.addcdiv.default)
def addcdiv(out, x, a, b, *, value=1):
    x, a, b = operands(out, x, a, b)
    return cast(lax.add(x, _scaled(quotient(a, b), value)), out.dtype)


@lowers(aten.nan_to_num.default, dynamic="nan posinf neginf")
def nan_to_num(out, x, nan=None, posinf=None, neginf=None):
    if not (is_floating(x.dtype) or is_complex(x.dtype)):
        return x
    if is_complex(x.dtype):
        part = np.dtype("float32") if x.dtype == np.complex64 else np.dtype("float64")
        half = type(out)(out.shape, part)
        return lax.complex(*(nan_to_num(half, part(x), nan, posinf, neginf) for part in (lax.real, lax.imag)))
    info = jnp.finfo(out.dtype)
    nan = 0.0 if nan is None else nan
    posinf, neginf = info.max if posinf is None else posinf, info.min if neginf is None else neginf
    nan, posinf, neginf = operands(out, nan, posinf, neginf, dtype=out.dtype)
    return jnp.where(x != x, nan, jnp.where(x == np.inf, posinf, jnp.where(x == -np.inf, neginf, x)))
