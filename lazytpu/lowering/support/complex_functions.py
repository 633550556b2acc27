"""Elementary functions of complex numbers with the signs of zero, and so the sides of branch cuts, that C gives.

Each takes real arrays too.  XLA's own functions lose a zero's sign, and make NaN of ``inf * 0``.
"""

from __future__ import annotations

import math
from functools import reduce

import jax.numpy as jnp
from jax import lax

from lazytpu.lowering.support import operands
from lazytpu.lowering.support.operands import is_complex, rounded_as_is


def _patched(of_numbers, patch):
    """Return ``of_numbers``; where it is given complex numbers, ``patch`` mends the parts of its result.

    Args:
        of_numbers: a function of lax.
        patch: takes the parts of the argument and those of the result, gives those of the better one.
    """

    def function(z):
        w = of_numbers(z)
        if not is_complex(z.dtype):
            return w
        return lax.complex(*patch(lax.real(z), lax.imag(z), lax.real(w), lax.imag(w)))

    return function


def _signed(x, y, re, im):
    return jnp.copysign(re, x), jnp.copysign(im, y)


def _of_exp(x, y, re, im):
    unknown = ~jnp.isfinite(y)
    re, im = jnp.where((x == jnp.inf) & unknown, x, re), jnp.where(y == 0, y, im)
    gone = (x == -jnp.inf) & unknown
    return jnp.where(gone, 0, re), jnp.where(gone, 0, im)


def _of_sqrt(x, y, re, im):
    im = jnp.copysign(im, y)
    re, im = jnp.where((x == jnp.inf) & (y != y), x, re), jnp.where((x == -jnp.inf) & (y != y), -x, im)
    return jnp.where(jnp.isinf(y), jnp.inf, re), jnp.where(jnp.isinf(y), y, im)


def _times(a, b):
    """Return ``a b``, which a zero makes zero, whatever the other is."""
    return jnp.where((a == 0) | (b == 0), jnp.copysign(1, a) * jnp.copysign(1, b) * 0, a * b)


def _of_sinh(x, y, re, im):  # XLA's has exp(x) - exp(-x), which small numbers get lost in
    re, im = _times(lax.sinh(x), lax.cos(y)), _times(lax.cosh(x), lax.sin(y))
    return jnp.where(jnp.isinf(x) & ~jnp.isfinite(y), x, re), im


def _of_cosh(x, y, re, im):
    re, im = _times(lax.cosh(x), lax.cos(y)), _times(lax.sinh(x), lax.sin(y))
    return jnp.where(jnp.isinf(x) & ~jnp.isfinite(y), jnp.inf, re), im


def _unknown(x, y):
    """Return where a part is NaN and none is infinite."""
    return ((x != x) | (y != y)) & ~jnp.isinf(x) & ~jnp.isinf(y)


def _of_asinh(x, y, re, im):
    unknown = _unknown(x, y)
    re, im = jnp.where(unknown, jnp.nan, re), jnp.where(unknown, jnp.where(y == 0, 0, jnp.nan), im)
    return _signed(x, y, re, im)


def _of_atanh(x, y, re, im):
    re = jnp.where(_unknown(x, y), jnp.where(x == 0, 0, jnp.nan), re)
    return _signed(x, y, re, jnp.where((y != y) | (x != x) & ~jnp.isinf(y), jnp.nan, im))


def _of_acos(x, y, re, im):
    unknown = _unknown(x, y)
    re = jnp.where(unknown, jnp.where(x == 0, math.pi / 2, jnp.nan), re)
    return re, jnp.copysign(jnp.where(unknown, jnp.nan, im), -y)


def _of_acosh(x, y, re, im):
    unknown = _unknown(x, y)
    im = jnp.where(unknown, jnp.where(x == 0, math.pi / 2, jnp.nan), im)
    return jnp.where(unknown, jnp.nan, re), jnp.copysign(im, y)


exp = _patched(lax.exp, _of_exp)
sinh = _patched(lax.sinh, _of_sinh)
cosh = _patched(lax.cosh, _of_cosh)
tanh = _patched(lax.tanh, lambda x, y, re, im: (jnp.where(x == 0, x, re), jnp.where(y == 0, y, im)))
asinh = _patched(lax.asinh, _of_asinh)
atanh = _patched(lax.atanh, _of_atanh)
acos = _patched(lax.acos, _of_acos)
acosh = _patched(lax.acosh, _of_acosh)
sqrt = _patched(lax.sqrt, _of_sqrt)
log = _patched(lax.log, lambda x, y, re, im: (jnp.where(jnp.isinf(x) | jnp.isinf(y), jnp.inf, re), im))
sgn = _patched(lax.sign, lambda x, y, re, im: [jnp.where((x == 0) & (y == 0), 0, part) for part in (re, im)])


def _turned(of_numbers, hyperbolic):
    """Return ``hyperbolic(i z) / i`` for complex numbers, else ``of_numbers``."""

    def function(z):
        if not is_complex(z.dtype):
            return of_numbers(z)
        w = hyperbolic(lax.complex(-lax.imag(z), lax.real(z)))
        return lax.complex(lax.imag(w), -lax.real(w))

    return function


sin = _turned(lax.sin, sinh)
tan = _turned(lax.tan, tanh)
asin = _turned(lax.asin, asinh)
atan = _turned(lax.atan, atanh)


def cos(z):
    return cosh(lax.complex(-lax.imag(z), lax.real(z))) if is_complex(z.dtype) else lax.cos(z)


def exp2(z):
    if not is_complex(z.dtype):
        return lax.exp2(z)
    return exp(lax.complex(lax.real(z) * math.log(2), lax.imag(z) * math.log(2)))


def _to_base(of_numbers, base):
    """Return the logarithm to ``base``: of complex numbers from the natural one, else ``of_numbers``."""

    def function(z):
        if not is_complex(z.dtype):
            return of_numbers(z)
        w = log(z)
        return lax.complex(lax.real(w) / math.log(base), lax.imag(w) / math.log(base))

    return function


log2 = _to_base(jnp.log2, 2)
log10 = _to_base(jnp.log10, 10)


def absolute(z):
    """Return the length of a complex number: infinite where a part is, whatever the other."""
    unbounded = jnp.isinf(lax.real(z)) | jnp.isinf(lax.imag(z))
    return jnp.where(unbounded, jnp.asarray(jnp.inf, lax.real(z).dtype), lax.abs(z))


def product(x, y):
    """Return ``x y``; of complex numbers, each product of parts is rounded, so that ``x conj(x)`` is real."""
    if not is_complex(x.dtype):
        if x is y and jnp.issubdtype(x.dtype, jnp.signedinteger):
            return lax.neg(lax.mul(x, lax.neg(x)))  # XLA takes a square for never negative, also where it wraps around
        return lax.mul(x, y)
    a, b, c, d = lax.real(x), lax.imag(x), lax.real(y), lax.imag(y)
    ac, bd, ad, bc = (rounded_as_is(p * q) for p, q in ((a, c), (b, d), (a, d), (b, c)))
    return lax.complex(ac - bd, ad + bc)


def quotient(x, y):
    """Return ``x / y``; of complex numbers by Smith's formula, as torch does, with its results at infinities."""
    if not is_complex(x.dtype):
        return operands.quotient(x, y)
    a, b, c, d = lax.real(x), lax.imag(x), lax.real(y), lax.imag(y)
    wide = lax.abs(c) >= lax.abs(d)
    a, b, c, d = (jnp.where(wide, p, q) for p, q in ((a, b), (b, a), (c, d), (d, c)))
    ratio = d / c
    im, length = b - a * ratio, c + d * ratio
    parts = (a + b * ratio) / length, jnp.where(wide, im, -im) / length
    at_zero = (c == 0) & (d == 0)
    return lax.complex(*(jnp.where(at_zero, p / lax.abs(c), part) for p, part in zip((a, b), parts, strict=True)))


def _product_as_c(x, y):
    """Return ``x y``, infinite where a factor or a product of parts is and the plain formula gives NaN twice."""
    given = a, b, c, d = lax.real(x), lax.imag(x), lax.real(y), lax.imag(y)
    re, im = a * c - b * d, a * d + b * c
    of_x, of_y = jnp.isinf(a) | jnp.isinf(b), jnp.isinf(c) | jnp.isinf(d)
    overflow = jnp.isinf(a * c) | jnp.isinf(b * d) | jnp.isinf(a * d) | jnp.isinf(b * c)
    lost = (re != re) & (im != im) & (of_x | of_y | overflow)

    def bounded(part, unbounded):
        part = jnp.where(part != part, jnp.copysign(0, part), part)
        return jnp.where(unbounded, jnp.copysign(jnp.isinf(part), part), part)

    a, b, c, d = (bounded(part, unbounded) for part, unbounded in zip(given, (of_x, of_x, of_y, of_y), strict=True))
    re = jnp.where(lost, jnp.inf * (a * c - b * d), re)
    return lax.complex(re, jnp.where(lost, jnp.inf * (a * d + b * c), im))


def power(x, n):
    """Return x ** n as C does."""
    return exp(_product_as_c(n, log(x)))


def integer_power(z, n):
    return lax.integer_pow(z, n) if jnp.issubdtype(z.dtype, jnp.floating) else reduce(product, [z] * n)


def reciprocal(z):
    return quotient(lax.full_like(z, 1), z) if is_complex(z.dtype) else 1 / z


def sigmoid(z):
    return reciprocal(1 + exp(-z)) if is_complex(z.dtype) else lax.logistic(z)


def expm1(z):
    if not is_complex(z.dtype):
        return lax.expm1(z)
    x, y = lax.real(z), lax.imag(z)
    return lax.complex(lax.expm1(x) * lax.cos(y) - 2 * lax.sin(y / 2) ** 2, lax.exp(x) * lax.sin(y))


def log1p(z):
    """Return log(1 + z); of complex numbers far from zero, without the square of the length, which may underflow."""
    if not is_complex(z.dtype):
        return lax.log1p(z)
    near = (lax.abs(z) < 0.5) | ~jnp.isfinite(z)
    return jnp.where(near, lax.log1p(z), log(lax.complex(1 + lax.real(z), lax.imag(z))))


def logaddexp(x, y):
    """Return log(e^x + e^y); the imaginary part of a complex result is not brought back to (-pi, pi], as in eager."""
    if not is_complex(x.dtype):
        return jnp.logaddexp(x, y)
    larger = lax.real(x) >= lax.real(y)
    high, low = jnp.where(larger, x, y), jnp.where(larger, y, x)
    result = high + log1p(exp(low - high))
    unbounded = jnp.isinf(lax.real(low)) & (lax.real(low) == lax.real(high))
    result = jnp.where(unbounded, jnp.where(lax.real(low) < 0, jnp.where(larger, y, x), log(exp(x) + exp(y))), result)
    return jnp.where((x != x) | (y != y), jnp.asarray(complex(jnp.nan, jnp.nan), x.dtype), result)
