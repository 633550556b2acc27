"""Products and functions that need no factorization: cross product, exponential, power sums."""

import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from lazytpu.lowering.registry import lowers
from lazytpu.lowering.support import sums
from lazytpu.lowering.support.operands import compute_dtype
from lazytpu.versions import passing_op

aten = torch.ops.aten


@lowers(aten.linalg_cross.default)
def linalg_cross(out, a, b, *, dim=-1):
    def turned(x, shift):
        return jnp.roll(x, shift, dim)

    return turned(a, -1) * turned(b, -2) - turned(a, -2) * turned(b, -1)


# The polynomial of degree 18 that is exp to rounding, in five products: coefficients of I, a, a^2, a^3 and a^6 in its
# five parts, and the 1-norms up to which it is (Bader, Blanes, Casas, "Computing the matrix exponential with an
# optimized Taylor polynomial approximation", 2019).
_TAYLOR = (
    (0, -1.00365581030144618291e-01, -8.02924648241156932449e-03, -8.92138498045729985177e-04, 0),
    (0, 3.97849749499645077844e-01, 1.36783778460411720168, 4.98289622525382669416e-01, -6.37898194594723280150e-04),
    (
        -10.9676396052962061844,
        1.68015813878906206114,
        0.0571779846478865511061,
        -6.98210122488052056106e-03,
        3.34975017086070470649e-05,
    ),
    (
        -0.0904316832390810593223,
        -0.0676404519071381882256,
        0.0675961301770459654925,
        2.95552570429315521194e-02,
        -1.39180257516060693404e-05,
    ),
    (0, 0, -9.23364619367118555360e-02, -1.69364939002081722752e-02, -1.40086798182036094347e-05),
)
_TAYLOR_NORM = {4: 3.010066362817634, 8: 1.090863719290036}  # by bytes of a real number


def _taylor(a):
    """Return exp of matrices of small norm."""
    a2 = a @ a
    a3 = a @ a2
    powers = jnp.broadcast_to(jnp.eye(a.shape[-1], dtype=a.dtype), a.shape), a, a2, a3, a3 @ a3
    parts = [sum(jnp.asarray(c, a.dtype) * power for c, power in zip(row, powers, strict=True) if c) for row in _TAYLOR]
    a9 = parts[3] + parts[0] @ parts[4]
    return parts[1] + (parts[2] + a9) @ a9


@lowers(aten.linalg_matrix_exp.default)
def linalg_matrix_exp(out, a):
    if a.size == 0:
        return a
    a = a.astype(compute_dtype(a.dtype))
    if a.shape[-1] == 1:
        return jnp.exp(a).astype(out.dtype)
    norm = jnp.max(jnp.sum(jnp.abs(a), -2), -1)
    doublings = jnp.ceil(jnp.log2(norm / _TAYLOR_NORM[norm.dtype.itemsize]))
    doublings = jnp.where(jnp.isfinite(norm), jnp.clip(doublings, 0, np.finfo(norm.dtype).maxexp), 0)
    scale = jnp.exp2(-doublings).astype(norm.dtype)[..., None, None]
    count = doublings.astype(jnp.int32)

    def square(state):
        i, result = state
        return i + 1, jnp.where((i < count)[..., None, None], result @ result, result)

    start = (jnp.zeros((), jnp.int32), _taylor(a * scale))
    return lax.while_loop(lambda state: state[0] < jnp.max(count), square, start)[1].astype(out.dtype)


@lowers(aten._compute_linear_combination.default)
def compute_linear_combination(out, terms, coefficients):
    return jnp.tensordot(coefficients, terms, 1)


@lowers(*passing_op("aten.linalg__powsum.default"))
def linalg_powsum(out, a, ord=2, dim=None, keepdim=False, *, dtype=None):
    wide = jnp.promote_types(out.dtype, jnp.float32)
    size = jnp.abs(a).astype(wide)
    axes = None if dim is None or len(dim) == 0 else tuple(dim)
    return sums.in_stages(size ** jnp.asarray(ord, wide), axes, keepdim).astype(out.dtype)
