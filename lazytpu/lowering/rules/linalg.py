"""Products and functions that need no factorization: cross product, exponential, power sums."""

import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from lazytpu.lowering.registry import lowers
from lazytpu.lowering.rules.operands import compute_dtype
from lazytpu.versions import passing_op

aten = torch.ops.aten


@lowers(aten.linalg_cross.default)
def linalg_cross(out, a, b, *, dim=-1):
    def turned(x, shift):
        return jnp.roll(x, shift, dim)

    return turned(a, -1) * turned(b, -2) - turned(a, -2) * turned(b, -1)


# Coefficients of the Pade approximant of degree 13 of exp, and the 1-norm up to which it is exact to rounding, in
# float64 (Higham, "The scaling and squaring method for the matrix exponential revisited", 2005).
_PADE = (
    *(64764752532480000, 32382376266240000, 7771770303897600, 1187353796428800, 129060195264000, 10559470521600),
    *(670442572800, 33522128640, 1323241920, 40840800, 960960, 16380, 182, 1),
)
_PADE_NORM = 5.371920351148152


def _pade(a):
    """exp of matrices of small norm."""
    b = [float(c) / _PADE[0] for c in _PADE]
    eye = jnp.eye(a.shape[-1], dtype=a.dtype)
    a2 = a @ a
    a4 = a2 @ a2
    a6 = a4 @ a2
    odd = a6 @ (b[13] * a6 + b[11] * a4 + b[9] * a2) + b[7] * a6 + b[5] * a4 + b[3] * a2 + b[1] * eye
    even = a6 @ (b[12] * a6 + b[10] * a4 + b[8] * a2) + b[6] * a6 + b[4] * a4 + b[2] * a2 + eye
    odd = a @ odd
    return jnp.linalg.solve(even - odd, even + odd)


@lowers(aten.linalg_matrix_exp.default)
def linalg_matrix_exp(out, a):
    if a.size == 0:
        return a
    a = a.astype(compute_dtype(a.dtype))
    norm = jnp.max(jnp.sum(jnp.abs(a), -2), -1)
    # Half of the norm that float64 allows keeps the denominator well conditioned in float32 as well.
    doublings = jnp.ceil(jnp.log2(norm / (_PADE_NORM / 2)))
    doublings = jnp.where(jnp.isfinite(norm), jnp.clip(doublings, 0, np.finfo(norm.dtype).maxexp), 0)
    scale = jnp.exp2(-doublings).astype(norm.dtype)[..., None, None]
    count = doublings.astype(jnp.int32)

    def square(state):
        i, result = state
        return i + 1, jnp.where((i < count)[..., None, None], result @ result, result)

    start = (jnp.zeros((), jnp.int32), _pade(a * scale))
    return lax.while_loop(lambda state: state[0] < jnp.max(count), square, start)[1].astype(out.dtype)


@lowers(aten._compute_linear_combination.default)
def compute_linear_combination(out, terms, coefficients):
    return jnp.tensordot(coefficients, terms, 1)


@lowers(*passing_op("aten.linalg__powsum.default"))
def linalg_powsum(out, a, ord=2, dim=None, keepdim=False, *, dtype=None):
    wide = jnp.promote_types(out.dtype, jnp.float32)
    size = jnp.abs(a).astype(wide)
    axes = None if dim is None or len(dim) == 0 else tuple(dim)
    return jnp.sum(size ** jnp.asarray(ord, wide), axes, keepdims=keepdim).astype(out.dtype)
