"""Special functions: error functions, gamma family, zeta, and orthogonal polynomials."""

from __future__ import annotations

import math

import jax.numpy as jnp
import jax.scipy.special as jsp
import numpy as np
import torch
from jax import lax

from lazytpu.lowering.registry import lowers, lowers_each
from lazytpu.lowering.rules.pointwise import times_log
from lazytpu.lowering.support.operands import cast, operand, operands, pointwise

aten = torch.ops.aten


def in_float64(fn):
    """Return the rule that computes ``fn`` in float64, whatever the dtype of the result."""
    return lambda out, *xs: cast(fn(*operands(out, *xs, dtype=np.float64)), out.dtype)


def _i0(x):
    return lax.exp(lax.abs(x)) * lax.bessel_i0e(x)


def _i1(x):
    return lax.exp(lax.abs(x)) * lax.bessel_i1e(x)


def _erfcx(x):
    """Return exp(x^2) erfc(x); beyond 25, where erfc nears underflow, by the asymptotic series."""
    z = 0.5 / (x * x)
    series = (1 - z * (1 - 3 * z * (1 - 5 * z * (1 - 7 * z * (1 - 9 * z))))) / (x * math.sqrt(math.pi))
    near = jnp.minimum(x, 25.0)
    return jnp.where(x > 25, series, lax.exp(near * near) * lax.erfc(near))


def _log_ndtr(x):
    """Return the log of the normal distribution function."""
    scaled = x * math.sqrt(0.5)
    low = lax.log(_erfcx(-scaled) / 2) - scaled * scaled
    return jnp.where(x < -1, low, lax.log1p(-lax.erfc(scaled) / 2))


def _entr(x):
    """Return -x log(x), continued to zero."""
    beyond = jnp.where(x == 0, 0.0, -jnp.inf).astype(x.dtype)
    return jnp.where(x != x, x, jnp.where(x > 0, -x * lax.log(x), beyond))


_BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510)  # B2, B4, ... B16


def _hurwitz(s, q):
    """Return zeta(s, q) = sum of (q + k)^-s by Euler and Maclaurin from the first q + k above 30, also for q < 0."""
    q = jnp.where(q > -1e6, q, q - jnp.floor(q) + 1e6)  # the terms that far below zero no longer count

    def more(state):
        return jnp.any(state[0] <= 30)

    def add(state):
        a, total = state
        return jnp.where(a <= 30, a + 1, a), jnp.where(a <= 30, total + lax.pow(a, -s), total)

    a, total = lax.while_loop(more, add, (q, jnp.zeros_like(q)))
    power = lax.pow(a, -s)
    total = total + a * power / (s - 1) + power / 2
    factor = s * power / a
    for j, bernoulli in enumerate(_BERNOULLI, start=1):
        total = total + bernoulli / math.factorial(2 * j) * factor
        factor = factor * (s + 2 * j - 1) * (s + 2 * j) / (a * a)
    return total


def _zeta(s, q):
    pole = (q <= 0) & (q == jnp.floor(q))
    undefined = (s < 1) | ((q < 0) & (s != jnp.floor(s)))
    value = jnp.where(undefined, jnp.nan, _hurwitz(s, jnp.where(jnp.isfinite(q), q, 1.0)))
    value = jnp.where(q == jnp.inf, jnp.nan, value)  # as in eager, where it is no limit either
    endless = jnp.where(q < 1, jnp.inf, jnp.where(q == 1, 1.0, jnp.nan))  # as in eager, where it is no limit for q > 1
    value = jnp.where(s == jnp.inf, endless, jnp.where(q == q, value, q))
    return jnp.where((pole & ~(s < 1)) | (s == 1), jnp.inf, value)


def _incomplete_gamma(fn, full):
    """Return ``fn`` (igamma, igammac) with eager's values at 0 and infinity; ``full`` is its value for x = inf."""

    def rule(a, x):
        value = jnp.where(
            jnp.isinf(a), jnp.where(jnp.isinf(x), jnp.nan, 1.0 - full), jnp.where(jnp.isinf(x), full, fn(a, x))
        )
        value = jnp.where(x == 0, 1.0 - full, value)
        value = jnp.where(a == 0, jnp.where(x > 0, full, jnp.nan), value)
        return jnp.where((a < 0) | (x < 0) | (x != x), jnp.nan, value)

    return in_float64(rule)


def _digamma(x):
    return jnp.where(x == 0, jnp.copysign(jnp.asarray(jnp.inf, x.dtype), -x), lax.digamma(x))


def _trigamma(x):
    """The reflection formula carries psi' to the numbers below 1/2."""
    below = x < 0.5
    sine = jnp.sin(math.pi * x)
    value = _zeta(jnp.full_like(x, 2), jnp.where(below, 1 - x, x))
    value = jnp.where(below, (math.pi / sine) ** 2 - value, value)
    return jnp.where(x == jnp.inf, 0.0, value)


lowers_each(
    {
        aten.erf.default: pointwise(lax.erf),
        aten.erfc.default: pointwise(lax.erfc),
        aten.erfinv.default: pointwise(lax.erf_inv),
        aten.lgamma.default: pointwise(lax.lgamma),
        aten.digamma.default: pointwise(_digamma),
        aten.igamma.default: _incomplete_gamma(lax.igamma, 1.0),
        aten.igammac.default: _incomplete_gamma(lax.igammac, 0.0),
        aten.i0.default: pointwise(_i0),
        aten.special_modified_bessel_i0.default: pointwise(_i0),
        aten.special_modified_bessel_i1.default: pointwise(_i1),
        aten.special_i0e.default: pointwise(lax.bessel_i0e),
        aten.special_i1.default: pointwise(_i1),
        aten.special_i1e.default: pointwise(lax.bessel_i1e),
        aten.special_entr.default: pointwise(_entr),
        aten.special_erfcx.default: in_float64(_erfcx),
        aten.special_log_ndtr.default: in_float64(_log_ndtr),
        aten.special_ndtri.default: pointwise(jsp.ndtri),
        aten.special_xlog1py.default: times_log(lax.log1p),
        aten.special_xlog1py.other_scalar: times_log(lax.log1p),
        aten.special_xlog1py.self_scalar: times_log(lax.log1p),
        aten.special_zeta.default: in_float64(_zeta),
        aten.special_zeta.other_scalar: in_float64(_zeta),
        aten.special_zeta.self_scalar: in_float64(_zeta),
    }
)


@lowers(aten.polygamma.default)
def polygamma(out, n, x):
    x = operand(x, out, np.float64)
    if n == 0:
        value = _digamma(x)
    elif n == 1:
        value = _trigamma(x)
    else:
        value = (-1) ** (n + 1) * math.gamma(n + 1) * _zeta(jnp.full_like(x, n + 1), x)
    return cast(value, out.dtype)


@lowers(aten.mvlgamma.default)
def mvlgamma(out, x, p):
    x = operand(x, out)
    terms = [lax.lgamma(x - 0.5 * j) for j in range(p)]
    return cast(sum(terms, start=p * (p - 1) / 4 * math.log(math.pi)), out.dtype)


def _recurrence(first, step, *, at=None):
    """Return the rule of a family of polynomials in x whose degree is a tensor.

    Args:
        first: function of x giving the polynomials of degree 0 and 1.
        step: function of x, the degree k and the polynomials of degrees k and k - 1 giving that of degree k + 1.
        at: function of x and the degree giving (where, value) for arguments with a value of their own.
    """

    def rule(out, x, n):
        x, n = operands(out, x, n)
        n = lax.convert_element_type(jnp.trunc(n), jnp.int32)
        zero, one = first(x)

        def advance(state):
            k, before, last, result = state
            following = step(x, k.astype(x.dtype), last, before)
            return k + 1, last, following, jnp.where(n == k + 1, following, result)

        result = jnp.where(n < 0, 0, jnp.where(n == 0, zero, one)).astype(x.dtype)
        top = jnp.max(n, initial=0)
        state = (jnp.ones((), jnp.int32), zero, one, result)
        *_, result = lax.while_loop(lambda s: s[0] < top, advance, state)
        if at is not None:
            where, value = at(x, n)
            result = jnp.where(where & (n >= 0), value.astype(x.dtype), result)
        return cast(result, out.dtype)

    return rule


def _chebyshev(slope, shift):
    """Return polynomials with p0 = 1, p1 = slope t + shift and p(k+1) = 2 t p(k) - p(k-1)."""
    return _recurrence(lambda t: (jnp.ones_like(t), slope * t + shift), lambda t, k, p, before: 2 * t * p - before)


def _shifted(rule):
    """Return ``rule`` at 2 x - 1."""
    return lambda out, x, n: rule(out, 2 * operand(x, out) - 1, n)


_POLYNOMIALS = {
    "chebyshev_polynomial_t": _chebyshev(1, 0),
    "chebyshev_polynomial_u": _chebyshev(2, 0),
    "chebyshev_polynomial_v": _chebyshev(2, -1),
    "chebyshev_polynomial_w": _chebyshev(2, 1),
    "shifted_chebyshev_polynomial_t": _shifted(_chebyshev(1, 0)),
    "shifted_chebyshev_polynomial_u": _shifted(_chebyshev(2, 0)),
    "shifted_chebyshev_polynomial_v": _shifted(_chebyshev(2, -1)),
    "shifted_chebyshev_polynomial_w": _shifted(_chebyshev(2, 1)),
    "hermite_polynomial_h": _recurrence(
        lambda x: (jnp.ones_like(x), 2 * x), lambda x, k, p, before: 2 * (x * p - k * before)
    ),
    "hermite_polynomial_he": _recurrence(lambda x: (jnp.ones_like(x), x), lambda x, k, p, before: x * p - k * before),
    "laguerre_polynomial_l": _recurrence(
        lambda x: (jnp.ones_like(x), 1 - x), lambda x, k, p, before: ((2 * k + 1 - x) * p - k * before) / (k + 1)
    ),
    "legendre_polynomial_p": _recurrence(
        lambda x: (jnp.ones_like(x), x), lambda x, k, p, before: ((2 * k + 1) * x * p - k * before) / (k + 1)
    ),
}
lowers_each(
    {
        getattr(getattr(aten, f"special_{name}"), overload): rule
        for name, rule in _POLYNOMIALS.items()
        for overload in ("default", "x_scalar", "n_scalar")
    }
)
