"""Linear systems: triangular, Cholesky and LU solves, inverses, determinants, least squares."""

import jax.numpy as jnp
import torch
from jax import lax

from lazytpu.lowering.registry import lowers
from lazytpu.lowering.rules.linalg_factor import adjoint, diagonal, linalg_lu_factor_ex, permutation, svd
from lazytpu.lowering.rules.pointwise import sign

aten = torch.ops.aten

# There ``solve`` gives the factors of the transpose of a contiguous real matrix, and its gradient expects them.
_SOLVE_TRANSPOSES = torch.__version__ < "2.11"  # compared as a version, not as text


def _broadcast(*matrices):
    """Return matrices with their batch dimensions broadcast together."""
    batch = jnp.broadcast_shapes(*(m.shape[:-2] for m in matrices))
    return tuple(jnp.broadcast_to(m, (*batch, *m.shape[-2:])) for m in matrices)


def _triangular(a, b, *, lower, left=True, transpose=False, conjugate=False, unit=False):
    """Return ``a`` solved for ``b``, both of one batch shape."""
    return lax.linalg.triangular_solve(
        a, b, left_side=left, lower=lower, transpose_a=transpose, conjugate_a=conjugate, unit_diagonal=unit
    )


@lowers(aten.linalg_solve_triangular.default)
def linalg_solve_triangular(out, a, b, *, upper, left=True, unitriangular=False):
    a, b = _broadcast(a, b)
    return _triangular(a, b, lower=not upper, left=left, unit=unitriangular)


@lowers(aten.triangular_solve.default)
def triangular_solve(out, b, a, upper=True, transpose=False, unitriangular=False):
    a, b = _broadcast(a, b)
    return _triangular(a, b, lower=not upper, transpose=transpose, unit=unitriangular), a


@lowers(aten.cholesky_solve.default, aten._cholesky_solve_helper.default)
def cholesky_solve(out, b, factor, upper=False):
    factor, b = _broadcast(factor, b)
    half = _triangular(factor, b, lower=not upper, transpose=upper, conjugate=upper)
    return _triangular(factor, half, lower=not upper, transpose=not upper, conjugate=not upper)


@lowers(aten.cholesky_inverse.default)
def cholesky_inverse(out, factor, upper=False):
    return cholesky_solve(out, jnp.eye(factor.shape[-1], dtype=factor.dtype), factor, upper)


@lowers(aten.linalg_lu_solve.default)
def linalg_lu_solve(out, lu, pivots, b, *, left=True, adjoint=False):
    if not left:
        # X op(A) = B is op(A)^T X^T = B^T; for the adjoint that is conj(A) X^T = B^T.
        if adjoint:
            return linalg_lu_solve(out, lu.conj(), pivots, b.mT).mT
        return linalg_lu_solve(out, lu.conj(), pivots, b.mT, adjoint=True).mT
    order = permutation(pivots, lu.shape[-1])
    lu, b = _broadcast(lu, b)
    order = jnp.broadcast_to(order, lu.shape[:-1])
    if adjoint:
        half = _triangular(lu, b, lower=False, transpose=True, conjugate=True)
        solution = _triangular(lu, half, lower=True, transpose=True, conjugate=True, unit=True)
        return jnp.take_along_axis(solution, jnp.argsort(order, -1)[..., None], -2)
    b = jnp.take_along_axis(b, order[..., None], -2)
    return _triangular(lu, _triangular(lu, b, lower=True, unit=True), lower=False)


def _is_vector(a, b):
    """Return whether the right-hand side is a batch of vectors: torch compares the shapes."""
    return b.ndim == 1 or b.shape == a.shape[:-1]


@lowers(aten._linalg_solve_ex.default, strided=True)
def linalg_solve_ex(out, a, b, *, left=True, check_errors=False, contiguous=True):
    transposed = contiguous and not jnp.iscomplexobj(a) and _SOLVE_TRANSPOSES
    lu, pivots, info = linalg_lu_factor_ex(None, a.mT if transposed else a)
    vector = _is_vector(a, b)
    rhs = b[..., None] if vector else b
    solution = linalg_lu_solve(None, lu, pivots, rhs, left=left or vector, adjoint=transposed)
    return solution[..., 0] if vector else solution, lu, pivots, info


@lowers(aten.linalg_inv_ex.default)
def linalg_inv_ex(out, a, *, check_errors=False):
    lu, pivots, info = linalg_lu_factor_ex(None, a)
    return linalg_lu_solve(None, lu, pivots, jnp.eye(a.shape[-1], dtype=a.dtype)), info


def _lu_for_determinant(a, contiguous):
    """Return the LU that torch's gradient expects: it factors the transpose of a contiguous real matrix."""
    return linalg_lu_factor_ex(None, a.mT if contiguous and not jnp.iscomplexobj(a) else a)[:2]


def _sign_of_pivots(pivots, dtype):
    """Return the determinant of the permutation: -1 for an odd number of interchanges."""
    swaps = jnp.sum(pivots != jnp.arange(1, pivots.shape[-1] + 1, dtype=pivots.dtype), -1)
    return (1 - 2 * (swaps % 2)).astype(dtype)


@lowers(aten._linalg_det.default, strided=True)
def linalg_det(out, a, *, contiguous=True):
    lu, pivots = _lu_for_determinant(a, contiguous)
    return jnp.prod(diagonal(lu), -1) * _sign_of_pivots(pivots, a.dtype), lu, pivots


@lowers(aten._linalg_slogdet.default, strided=True)
def linalg_slogdet(out, a, *, contiguous=True):
    lu, pivots = _lu_for_determinant(a, contiguous)
    diag = diagonal(lu)
    signs = jnp.prod(sign(diag), -1) * _sign_of_pivots(pivots, a.dtype)
    return signs, jnp.sum(jnp.log(jnp.abs(diag)), -1), lu, pivots


@lowers(aten.linalg_lstsq.default)
def linalg_lstsq(out, a, b, rcond=None, *, driver=None):
    solution_type, residuals_type, rank_type, values_type = out
    vector = _is_vector(a, b)
    m, n = a.shape[-2:]
    a, b = _broadcast(a, b[..., None] if vector else b)
    u, values, vh = svd(a, full_matrices=False)
    if rcond is None or driver == "gels":
        rcond = jnp.finfo(a.dtype).eps * max(m, n)
    # gels knows no rank: its matrices have full rank.
    kept = values > jnp.asarray(rcond, values.dtype) * values[..., :1] if driver != "gels" else values > -1
    inverse = jnp.where(kept, 1 / values, 0)[..., None].astype(a.dtype)
    solution = adjoint(vh) @ (inverse * (adjoint(u) @ b))
    residuals = jnp.sum(jnp.square(jnp.abs(b - a @ solution)), -2)
    solution = solution[..., 0] if vector else solution
    rank = jnp.sum(kept, -1, dtype=rank_type.dtype)
    none = [t.shape == (0,) for t in out]
    return (
        solution,
        jnp.zeros((0,), residuals_type.dtype) if none[1] else residuals,
        jnp.zeros((0,), rank_type.dtype) if none[2] else rank.reshape(rank_type.shape),
        jnp.zeros((0,), values_type.dtype) if none[3] else values,
    )


@lowers(aten.linalg_pinv.atol_rtol_tensor)
def linalg_pinv(out, a, *, atol=None, rtol=None, hermitian=False):
    if a.size == 0:
        return jnp.zeros(out.shape, out.dtype)
    if hermitian:
        u, values = lax.linalg.eigh(a, symmetrize_input=False)
        vh, size = adjoint(u), jnp.abs(values)
    else:
        u, values, vh = svd(a, full_matrices=False)
        size = values
    if rtol is None:
        rtol = jnp.asarray(jnp.finfo(a.dtype).eps * max(a.shape[-2:]), values.dtype)
        rtol = rtol if atol is None else jnp.where(atol > 0, 0, rtol)
    atol = jnp.zeros((), values.dtype) if atol is None else atol
    threshold = jnp.maximum(atol[..., None], rtol[..., None] * jnp.max(size, -1, keepdims=True))
    inverse = jnp.where(size > threshold, 1 / values, 0).astype(a.dtype)
    return adjoint(vh) @ (inverse[..., None] * adjoint(u))
