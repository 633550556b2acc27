"""Factorizations: QR, SVD, eigenvalues, Cholesky, LU, and the Householder products of QR.

XLA calls LAPACK or cuSOLVER for them, with the conventions torch has: pivots count from one, ``info`` is 0 or the
place of the first pivot that failed.
"""

from functools import partial

import jax
import jax.numpy as jnp
import torch
from jax import lax

from lazytpu.lowering.registry import lowers, target_platform
from lazytpu.versions import passing_op

aten = torch.ops.aten


def _empty(out):
    """Return the result of size zero that torch returns for a factor nobody asked for."""
    return jnp.zeros(out.shape, out.dtype)


def diagonal(a):
    """Return the main diagonal of each matrix."""
    return jnp.diagonal(a, axis1=-2, axis2=-1)


def adjoint(a):
    """Return the conjugate transpose of each matrix."""
    return lax.conj(a.mT) if jnp.iscomplexobj(a) else a.mT


def first_bad(bad):
    """Return LAPACK's ``info``: 1 + the first index where ``bad`` holds along the last axis, else 0."""
    if bad.shape[-1] == 0:
        return jnp.zeros(bad.shape[:-1], jnp.int32)
    first = lax.argmax(bad, bad.ndim - 1, jnp.int32)
    return jnp.where(jnp.any(bad, -1), first + 1, 0)


@lowers(aten.linalg_qr.default)
def linalg_qr(out, a, mode="reduced"):
    if mode == "r":
        return _empty(out[0]), jnp.linalg.qr(a, mode="r")
    return lax.linalg.qr(a, full_matrices=mode == "complete")


@lowers(aten.geqrf.default)
def geqrf(out, a):
    h, tau = jnp.linalg.qr(a, mode="raw")
    return h.mT, tau


@lowers(aten.linalg_householder_product.default)
def linalg_householder_product(out, a, tau):
    return lax.linalg.householder_product(a, tau)


@lowers(aten.ormqr.default)
def ormqr(out, a, tau, c, left=True, transpose=False):
    if not hasattr(lax.linalg, "ormqr"):  # jax 0.9
        missing = [(0, 0, 0)] * (a.ndim - 1) + [(0, a.shape[-2] - a.shape[-1], 0)]
        q = lax.linalg.householder_product(lax.pad(a, jnp.zeros((), a.dtype), missing), tau)
        q = adjoint(q) if transpose else q
        return q @ c if left else c @ q
    return lax.linalg.ormqr(a, tau, c, left=left, transpose=transpose)


def svd(a, **how):
    """Return the singular values of each matrix, and its singular vectors.

    XLA for TPUs ends the process at what jax makes of it with integers of 64 bits.
    """
    decompose = partial(lax.linalg.svd, **how)
    if target_platform() != "tpu" or a.dtype in (jnp.float64, jnp.complex128):
        return decompose(a)
    from jax import export  # loads flatbuffers where it is installed

    with jax.enable_x64(False):
        exported = export.export(jax.jit(decompose), platforms=("tpu",))(jax.ShapeDtypeStruct(a.shape, a.dtype))
    return exported.call(a)


@lowers(aten._linalg_svd.default)
def linalg_svd(out, a, full_matrices=False, compute_uv=True, *, driver=None):
    if not compute_uv:
        return _empty(out[0]), svd(a, compute_uv=False), _empty(out[2])
    return svd(a, full_matrices=full_matrices)


@lowers(aten._linalg_eigh.default)
def linalg_eigh(out, a, UPLO="L", compute_v=True):
    vectors, values = lax.linalg.eigh(a, lower=UPLO.upper() == "L", symmetrize_input=False)
    return values, vectors if compute_v else _empty(out[1])


if hasattr(aten, "linalg_polar"):  # since torch 2.15

    @lowers(aten.linalg_polar.default)
    def linalg_polar(out, a):
        u, values, vh = svd(a, full_matrices=False)
        stretched = adjoint(vh) * values[..., None, :].astype(a.dtype)
        return jnp.matmul(u, vh, precision="highest"), jnp.matmul(stretched, vh, precision="highest")

    @lowers(aten.linalg_matrix_sqrth.default)
    def linalg_matrix_sqrth(out, a):
        vectors, values = lax.linalg.eigh(a, lower=True, symmetrize_input=False)
        roots = lax.sqrt(lax.max(values, lax.full_like(values, 0))).astype(a.dtype)
        return jnp.matmul(vectors * roots[..., None, :], adjoint(vectors), precision="highest")


@lowers(aten.linalg_eig.default)
def linalg_eig(out, a):
    values, vectors = lax.linalg.eig(a, compute_left_eigenvectors=False)
    return values, vectors


@lowers(aten._linalg_eigvals.default)
def linalg_eigvals(out, a):
    return lax.linalg.eig(a, compute_left_eigenvectors=False, compute_right_eigenvectors=False)[0]


def _cholesky_to_failure(a):
    """Column by column, for matrices that are not positive definite: the columns done, and the column that failed."""
    rows = jnp.arange(a.shape[-1])

    def column(j, state):
        a, info = state
        pivot = a[..., j, j].real
        info = jnp.where((info == 0) & ~(pivot > 0), j + 1, info).astype(jnp.int32)
        alive = (info == 0)[..., None, None]
        root = jnp.sqrt(pivot)[..., None]
        below = jnp.where(rows > j, a[..., :, j] / root, 0)
        trailing = a - below[..., :, None] * below[..., None, :].conj()
        done = trailing.at[..., :, j].set(jnp.where(rows == j, root, jnp.where(rows > j, below, a[..., :, j])))
        return jnp.where(alive, done, a), info

    a, info = lax.fori_loop(0, a.shape[-1], column, (a, jnp.zeros(a.shape[:-2], jnp.int32)))
    return jnp.tril(a), info


@lowers(aten.linalg_cholesky_ex.default)
def linalg_cholesky_ex(out, a, *, upper=False, check_errors=False):
    a = adjoint(a) if upper else a
    factor = jnp.tril(lax.linalg.cholesky(a, symmetrize_input=False))
    info = jnp.zeros(a.shape[:-2], jnp.int32)
    if a.size:
        failed = jnp.any(jnp.isnan(diagonal(factor)), -1)
        slow, info = lax.cond(jnp.any(failed), _cholesky_to_failure, lambda _: (factor, info), a)
        factor = jnp.where(failed[..., None, None], slow, factor)
    return adjoint(factor) if upper else factor, info


@lowers(*passing_op("aten.cholesky.default"))
def cholesky(out, a, upper=False):
    if a.size == 0:  # of any shape, for torch looks at the elements first
        return a
    return linalg_cholesky_ex(None, a, upper=upper)[0]


def _lu_without_pivots(a):
    """Gaussian elimination in the order of the rows."""
    m, n = a.shape[-2:]
    rows, columns = jnp.arange(m), jnp.arange(n)

    def eliminate(k, a):
        pivot = a[..., k, k][..., None]
        below = jnp.where((rows > k) & (pivot != 0), a[..., :, k] / pivot, 0)
        right = jnp.where(columns > k, a[..., k, :], 0)
        a = a - below[..., :, None] * right[..., None, :]
        return a.at[..., :, k].set(jnp.where((rows > k) & (pivot != 0), below, a[..., :, k]))

    return lax.fori_loop(0, min(m, n), eliminate, a)


@lowers(aten.linalg_lu_factor_ex.default)
def linalg_lu_factor_ex(out, a, *, pivot=True, check_errors=False):
    if pivot:
        lu, pivots, _ = lax.linalg.lu(a)
        pivots = pivots + 1
    else:
        lu = _lu_without_pivots(a)
        k = min(a.shape[-2:])
        pivots = jnp.broadcast_to(jnp.arange(1, k + 1, dtype=jnp.int32), (*a.shape[:-2], k))
    return lu, pivots, first_bad(diagonal(lu) == 0)


def permutation(pivots, rows):
    """Return the order of the rows after LAPACK's interchanges."""
    return lax.linalg.lu_pivots_to_permutation(pivots - 1, rows)


def _permutation_matrix(pivots, rows, dtype):
    """Return P of ``A = P L U``."""
    return (permutation(pivots, rows)[..., None, :] == jnp.arange(rows, dtype=jnp.int32)[:, None]).astype(dtype)


def _triangles(lu):
    """Return the unit lower and the upper factor that share one matrix."""
    k = min(lu.shape[-2:])
    return jnp.tril(lu[..., :, :k], -1) + jnp.eye(lu.shape[-2], k, dtype=lu.dtype), jnp.triu(lu[..., :k, :])


@lowers(aten.linalg_lu.default)
def linalg_lu(out, a, *, pivot=True):
    lu, pivots, _ = linalg_lu_factor_ex(None, a, pivot=pivot)
    p = _permutation_matrix(pivots, a.shape[-2], a.dtype) if pivot else _empty(out[0])
    return p, *_triangles(lu)


@lowers(aten.lu_unpack.default)
def lu_unpack(out, lu, pivots, unpack_data=True, unpack_pivots=True):
    p = _permutation_matrix(pivots, lu.shape[-2], lu.dtype) if unpack_pivots else _empty(out[0])
    return p, *(_triangles(lu) if unpack_data else (_empty(out[1]), _empty(out[2])))
