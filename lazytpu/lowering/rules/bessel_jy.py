"""Bessel functions of the first and second kind, of order 0 and 1.

Up to 5 they are quotients of polynomials in x^2, with the first zeros split off; farther out

    J = sqrt(2 / (pi x)) (P cos t - 5/x Q sin t),  Y = sqrt(2 / (pi x)) (P sin t + 5/x Q cos t),
    t = x - (n/2 + 1/4) pi,

with P and Q quotients of polynomials in 25 / x^2.  The coefficients are those of S. L. Moshier's Cephes library (j0.c
and j1.c).  Torch leaves out the first coefficient, 1, of the denominators of Q, of the near J and of the near Y, which
makes its results wrong by 2e-7 about 5.5.
"""

from __future__ import annotations

import math
from functools import reduce

import jax.numpy as jnp
import torch
from jax import lax

from lazytpu.lowering.registry import lowers_each
from lazytpu.lowering.support.operands import pointwise

aten = torch.ops.aten

_NEAR = 5.0

# By order: numerator and denominator, from the highest power on.
_P = (
    (
        (7.96936729297347051624e-4, 8.28352392107440799803e-2, 1.23953371646414299388, 5.44725003058768775090)
        + (8.74716500199817011941, 5.30324038235394892183, 9.99999999999999997821e-1),
        (9.24408810558863637013e-4, 8.56288474354474431428e-2, 1.25352743901058953537, 5.47097740330417105182)
        + (8.76190883237069594232, 5.30605288235394617618, 1.00000000000000000218),
    ),
    (
        (7.62125616208173112003e-4, 7.31397056940917570436e-2, 1.12719608129684925192, 5.11207951146807644818)
        + (8.42404590141772420927, 5.21451598682361504063, 1.00000000000000000254),
        (5.71323128072548699714e-4, 6.88455908754495404082e-2, 1.10514232634061696926, 5.07386386128601488557)
        + (8.39985554327604159757, 5.20982848682361821619, 9.99999999999999997461e-1),
    ),
)
_Q = (
    (
        (-1.13663838898469149931e-2, -1.28252718670509318512, -1.95539544257735972385e1, -9.32060152123768231369e1)
        + (-1.77681167980488050595e2, -1.47077505154951170175e2, -5.14105326766599330220e1, -6.05014350600728481186),
        (1.0, 6.43178256118178023184e1, 8.56430025976980587198e2, 3.88240183605401609683e3, 7.24046774195652478189e3)
        + (5.93072701187316984827e3, 2.06209331660327847417e3, 2.42005740240291393179e2),
    ),
    (
        (5.10862594750176621635e-2, 4.98213872951233449420, 7.58238284132545283818e1, 3.66779609360150777800e2)
        + (7.10856304998926107277e2, 5.97489612400613639965e2, 2.11688757100572135698e2, 2.52070205858023719784e1),
        (1.0, 7.42373277035675149943e1, 1.05644886038262816351e3, 4.98641058337653607651e3, 9.56231892404756170795e3)
        + (7.99704160447350683650e3, 2.82619278517639096600e3, 3.36093607810698293419e2),
    ),
)
_J = (
    (
        (-4.79443220978201773821e9, 1.95617491946556577543e12, -2.49248344360967716204e14, 9.70862251047306323952e15),
        (1.0, 4.99563147152651017219e2, 1.73785401676374683123e5, 4.84409658339962045305e7, 1.11855537045356834862e10)
        + (2.11277520115489217587e12, 3.10518229857422583814e14, 3.18121955943204943306e16, 1.71086294081043136091e18),
    ),
    (
        (-8.99971225705559398224e8, 4.52228297998194034323e11, -7.27494245221818276015e13, 3.68295732863852883286e15),
        (1.0, 6.20836478118054335476e2, 2.56987256757748830383e5, 8.35146791431949253037e7, 2.21511595479792499675e10)
        + (4.74914122079991414898e12, 7.84369607876235854894e14, 8.95222336184627338078e16, 5.32278620332680085395e18),
    ),
)
_Y = (
    (
        (1.55924367855235737965e4, -1.46639295903971606143e7, 5.43526477051876500413e9, -9.82136065717911466409e11)
        + (
            8.75906394395366999549e13,
            -3.46628303384729719441e15,
            4.42733268572569800351e16,
            -1.84950800436986690637e16,
        ),
        (1.0, 1.04128353664259848412e3, 6.26107330137134956842e5, 2.68919633393814121987e8, 8.64002487103935000337e10)
        + (2.02979612750105546709e13, 3.17157752842975028269e15, 2.50596256172653059228e17),
    ),
    (
        (1.26320474790178026440e9, -6.47355876379160291031e11, 1.14509511541823727583e14, -8.12770255501325109621e15)
        + (2.02439475713594898196e17, -7.78877196265950026825e17),
        (1.0, 5.94301592346128195359e2, 2.35564092943068577943e5, 7.34811944459721705660e7, 1.87601316108706159478e10)
        + (3.88231277496238566008e12, 6.20557727146953693363e14, 6.87141087355300489866e16, 3.97270608116560655612e18),
    ),
)
_ZEROS = ((5.78318596294678452118, 3.04712623436620863991e1), (1.46819706421238932572e1, 4.92184563216946036703e1))
"""Squares of the first zeros of J."""


def _quotient(coefficients, z):
    above, below = (reduce(lambda value, c: value * z + c, some, jnp.zeros_like(z)) for some in coefficients)
    return above / below


def _near_j(order, x):
    z = x * x
    value = _quotient(_J[order], z) * (z - _ZEROS[order][0]) * (z - _ZEROS[order][1])
    return value * x if order else jnp.where(x < 1e-5, 1 - z / 4, value)


def _near_y(order, x):
    log = lax.log(x) * _near_j(order, x)
    return (x if order else 1) * _quotient(_Y[order], x * x) + 2 / math.pi * (log - 1 / x if order else log)


def _far(order, x):
    """Return P, 5/x Q and t, and what the sum is to be multiplied with."""
    z = 25 / (x * x)
    p, q = _quotient(_P[order], z), 5 / x * _quotient(_Q[order], z)
    return p, q, x - (order / 2 + 0.25) * math.pi, math.sqrt(2 / math.pi) / lax.sqrt(x)


def _j(order):
    def bessel_j(x):
        size = lax.abs(x)
        p, q, t, scale = _far(order, jnp.maximum(size, _NEAR))
        far = (p * lax.cos(t) - q * lax.sin(t)) * scale
        value = jnp.where(size <= _NEAR, _near_j(order, jnp.minimum(size, _NEAR)), far)
        return jnp.where(x < 0, -value, value) if order else value

    return bessel_j


def _y(order):
    def bessel_y(x):
        p, q, t, scale = _far(order, jnp.maximum(x, _NEAR))
        far = (p * lax.sin(t) + q * lax.cos(t)) * scale
        value = jnp.where(x <= _NEAR, _near_y(order, jnp.clip(x, 0, _NEAR)), far)
        return jnp.where(x == 0, -jnp.inf, jnp.where(x < 0, jnp.nan, value))

    return bessel_y


lowers_each(
    {
        aten.special_bessel_j0.default: pointwise(_j(0)),
        aten.special_bessel_j1.default: pointwise(_j(1)),
        aten.special_bessel_y0.default: pointwise(_y(0)),
        aten.special_bessel_y1.default: pointwise(_y(1)),
    }
)
