"""Elementary functions of complex numbers with the signs of zero, and so the sides of branch cuts, that C gives.

Each takes real arrays too.  XLA's own functions lose a zero's sign, and make NaN of ``inf * 0``.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax import lax

from lazytpu.lowering.support.operands import is_complex


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


exp = _patched(lax.exp, _of_exp)
sinh = _patched(lax.sinh, _of_sinh)
cosh = _patched(lax.cosh, _of_cosh)
tanh = _patched(lax.tanh, lambda x, y, re, im: (jnp.where(x == 0, x, re), jnp.where(y == 0, y, im)))
asinh = _patched(lax.asinh, _signed)
atanh = _patched(lax.atanh, _signed)
acos = _patched(lax.acos, lambda x, y, re, im: (re, jnp.copysign(im, -y)))
acosh = _patched(lax.acosh, lambda x, y, re, im: (re, jnp.copysign(im, y)))
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


def power(x, n):
    """Return x ** n; of a positive real number, a real power is real."""
    real = (lax.imag(x) == 0) & (lax.real(x) > 0) & (lax.imag(n) == 0) & jnp.isfinite(lax.real(n))
    of_real = lax.pow(jnp.where(real, lax.real(x), 1), lax.real(n))
    result = jnp.where(real, lax.complex(of_real, jnp.zeros_like(of_real)), lax.pow(x, n))
    result = jnp.where((x == 0) & (lax.real(n) > 0), jnp.zeros_like(x), result)
    return jnp.where(n == 0, jnp.ones_like(x), result)
