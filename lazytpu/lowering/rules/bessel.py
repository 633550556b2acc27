"""Modified and spherical Bessel functions and the Airy function, which XLA does not have.

Near zero they are their power series, farther out Laplace integrals that the trapezoidal rule sums to the last
digits of float64, as it converges exponentially for integrands that are analytic and fall like exp(-s^2):

    K_n(x) = sqrt(pi / (2 x)) e^-x A_n(x)
    A_n(z) = 1 / Gamma(n + 1/2) integral of e^(-s^2) s^(2n) (1 + s^2 / (2 z))^(n - 1/2) ds over the real line
    Ai(x)  = e^-z / pi integral of e^(-sqrt(x) t^2) cos(t^3 / 3) dt over t > 0, with z = 2/3 x^(3/2), x complex

(DLMF 10.32.8 with t = 1 + s^2 / z, and 9.5.8.)  Everything is computed in float64.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from lazytpu.lowering.registry import lowers_each
from lazytpu.lowering.rules.special import in_float64

aten = torch.ops.aten

_STEP = 0.2
_NODES = np.arange(-6.4, 6.4 + _STEP / 2, _STEP)
_WEIGHTS = _STEP * np.exp(-_NODES * _NODES)
_AIRY_NEAR = 4.0
_TERMS = 30
_EULER = 0.5772156649015329


def _laplace(order, z):
    """Return A_n(z) for order 0 or 1."""
    s2 = _NODES**2
    weights = _WEIGHTS / math.gamma(order + 0.5) * s2**order
    root = lax.sqrt(1 + s2 / (2 * z[..., None]))
    return jnp.sum(weights * (root if order else 1 / root), axis=-1)


def _series(order, q):
    """Return the sum of q^k / (k! (k+n)!), and the same sum weighted by psi(k+1) + psi(k+n+1)."""
    term = jnp.full_like(q, 1.0)
    digammas = 2 * -_EULER + order
    total, weighted = term, term * digammas
    for k in range(1, _TERMS):
        term = term * (q / (k * (k + order)))
        digammas += 1 / k + 1 / (k + order)
        total, weighted = total + term, weighted + term * digammas
    return total, weighted


def _k(order, scaled):
    def modified_bessel_k(x):
        small, large = jnp.clip(x, 0, 2.0), jnp.clip(x, 2.0, 1e300)
        total, weighted = _series(order, small * small / 4)
        near = (-1) ** order * (small / 2) ** order * (weighted / 2 - jnp.log(small / 2) * total)
        if order:
            near = near + 1 / small
        far = lax.sqrt(math.pi / (2 * large)) * _laplace(order, large)
        value = jnp.where(x <= 2, near * jnp.exp(small) if scaled else near, far if scaled else far * jnp.exp(-large))
        value = jnp.where(x == jnp.inf, 0.0, jnp.where(x == 0, jnp.inf, value))
        return jnp.where(x >= 0, value, jnp.nan)

    return modified_bessel_k


def _airy_far(size, turn):
    """Return Ai(x) e^z for x = ``size`` * ``turn``, where ``size`` >= ``_AIRY_NEAR`` and ``turn`` has modulus 1."""
    root = np.sqrt(turn)  # of positive real part; t = s / scale makes the modulus of the exponential e^(-s^2)
    scale = lax.sqrt(lax.sqrt(size) * root.real)
    waves = _WEIGHTS * np.exp(-1j * root.imag / root.real * _NODES**2)
    heights = lax.cos(_NODES**3 / (3 * scale[..., None] ** 3))
    return lax.complex(*(jnp.sum(part * heights, axis=-1) / (2 * math.pi * scale) for part in (waves.real, waves.imag)))


def _airy_near(x):
    """Return Ai(x) by its Maclaurin series."""
    cube = x * x * x
    even, odd = jnp.ones_like(x), x
    evens, odds = even, odd
    for k in range(1, _TERMS):
        even, odd = even * cube / ((3 * k - 1) * (3 * k)), odd * cube / ((3 * k) * (3 * k + 1))
        evens, odds = evens + even, odds + odd
    return evens / (3 ** (2 / 3) * math.gamma(2 / 3)) - odds / (3 ** (1 / 3) * math.gamma(1 / 3))


def _airy(x):
    size = jnp.clip(lax.abs(x), _AIRY_NEAR, 1e200)
    z = 2 / 3 * size * lax.sqrt(size)
    turn = np.exp(1j * math.pi / 3)
    right = lax.real(_airy_far(size, 1 + 0j)) * jnp.exp(-z)
    left = 2 * lax.real(turn * lax.complex(lax.cos(z), -lax.sin(z)) * _airy_far(size, turn))
    far = jnp.where(x > 0, right, left)  # Ai(-x) = 2 Re(turn Ai(x turn)), DLMF 9.2.14
    value = jnp.where(lax.abs(x) < _AIRY_NEAR, _airy_near(jnp.clip(x, -_AIRY_NEAR, _AIRY_NEAR)), far)
    return jnp.where(lax.abs(x) == jnp.inf, jnp.nan, jnp.where(x != x, x, value))


def _spherical_j0(x):
    q = x * x
    near = jnp.ones_like(x)
    for k in range(7, 0, -1):
        near = 1 - near * q / (2 * k * (2 * k + 1))
    return jnp.where(lax.abs(x) == jnp.inf, 0.0, jnp.where(lax.abs(x) < 0.5, near, lax.sin(x) / x))


lowers_each(
    {
        op: in_float64(fn)
        for op, fn in {
            aten.special_airy_ai.default: _airy,
            aten.special_modified_bessel_k0.default: _k(0, scaled=False),
            aten.special_modified_bessel_k1.default: _k(1, scaled=False),
            aten.special_scaled_modified_bessel_k0.default: _k(0, scaled=True),
            aten.special_scaled_modified_bessel_k1.default: _k(1, scaled=True),
            aten.special_spherical_bessel_j0.default: _spherical_j0,
        }.items()
    }
)
