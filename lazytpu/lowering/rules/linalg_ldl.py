"""Bunch-Kaufman factorization ``A = P L D L^T P^T`` of symmetric and Hermitian matrices, and its solves.

XLA has no such factorization.  The results have LAPACK's layout: ``L`` below the diagonal with the interchanges not
applied to earlier columns, 1x1 and 2x2 blocks of ``D`` on the diagonal, pivots from one, negative for a 2x2 block.
"""

import math

import jax
import jax.numpy as jnp
import torch
from jax import lax

from lazytpu.lowering.registry import lowers

aten = torch.ops.aten

# The bound on element growth that makes one 2x2 step as good as two 1x1 steps (Bunch and Kaufman, 1977).
_ALPHA = (1 + math.sqrt(17)) / 8


def _size(x):
    """LAPACK's cheap absolute value."""
    return jnp.abs(x.real) + jnp.abs(x.imag) if jnp.iscomplexobj(x) else jnp.abs(x)


def _each_matrix(function, *arrays, dims):
    """Return ``function`` over the batch, as one vmap."""
    batch = arrays[0].shape[: arrays[0].ndim - dims[0]]
    flat = [x.reshape(math.prod(batch), *x.shape[len(batch) :]) for x in arrays]
    return jax.tree.map(lambda r: r.reshape(*batch, *r.shape[1:]), jax.vmap(function)(*flat))


def _interchange(x, i, j):
    """Return rows ``i`` and ``j`` of ``x`` exchanged."""
    rows = jnp.arange(x.shape[0])
    return x[jnp.where(rows == i, j, jnp.where(rows == j, i, rows))]


def _choose_pivot(s, k, conj):
    """Return the row to interchange at step ``k``, whether the step is 2x2, and whether the column is zero."""
    n = s.shape[0]
    rows = jnp.arange(n)
    diagonal = _size(jnp.diagonal(s).real if conj else jnp.diagonal(s))
    column = jnp.where(rows > k, _size(s[:, k]), 0)
    largest = jnp.argmax(column).astype(jnp.int32)
    column_max = column[largest]
    row_max = jnp.max(jnp.where((rows >= k) & (rows != largest), _size(s[largest]), 0))
    here = diagonal[k]
    zero = (jnp.maximum(here, column_max) == 0) | jnp.isnan(here)
    stay = zero | (here >= _ALPHA * column_max) | (here >= _ALPHA * column_max * (column_max / row_max))
    single = stay | (diagonal[largest] >= _ALPHA * row_max)
    return jnp.where(stay, k, largest), ~single, zero


def _factor(a, conj):
    """Factor one matrix; return LD, pivots and info."""
    n = a.shape[0]
    rows = jnp.arange(n)
    conjugate = jnp.conj if conj else (lambda x: x)
    below = jnp.tril(a, -1)
    diagonal = jnp.diagonal(a).real.astype(a.dtype) if conj else jnp.diagonal(a)
    full = below + conjugate(below).T + jnp.diag(diagonal)

    def step(state):
        k, s, ld, pivots, info = state
        pivot, double, zero = _choose_pivot(s, k, conj)
        info = jnp.where((info == 0) & zero, k + 1, info)
        target = k + double.astype(jnp.int32)
        s = _interchange(_interchange(s, target, pivot).T, target, pivot).T
        # One column.
        d = s[k, k]
        u = jnp.where(rows > k, s[:, k], 0)
        w = jnp.where(zero, 0, u / d)
        s1 = s - w[:, None] * conjugate(u)[None, :]
        ld1 = ld.at[:, k].set(jnp.where(rows == k, d, w))
        # Two columns; k + 1 is clipped where the step is not taken anyway.
        j = jnp.minimum(k + 1, n - 1)
        e, f = s[j, k], s[j, j]
        x, y = jnp.where(rows > j, s[:, k], 0), jnp.where(rows > j, s[:, j], 0)
        # Inverse of [[d, e'], [e, f]], scaled by e as LAPACK does against overflow.
        de, fe = d / e, f / conjugate(e)
        scale = 1 / (de * fe - 1)
        wx = scale * (x * fe / e - y / conjugate(e))
        wy = scale * (y * de / conjugate(e) - x / e)
        s2 = s - wx[:, None] * conjugate(x)[None, :] - wy[:, None] * conjugate(y)[None, :]
        ld2 = ld.at[:, k].set(jnp.where(rows == k, d, jnp.where(rows == j, e, wx)))
        ld2 = ld2.at[:, j].set(jnp.where(rows == j, f, wy))
        one = pivots.at[k].set(pivot + 1)
        two = pivots.at[k].set(-pivot - 1).at[j].set(-pivot - 1)
        taken = [jnp.where(double, *choice) for choice in ((s2, s1), (ld2, ld1), (two, one))]
        return target + 1, *taken, info

    zero = jnp.zeros((), jnp.int32)
    start = (zero, full, jnp.zeros_like(a), jnp.zeros(n, jnp.int32), zero)
    return lax.while_loop(lambda state: state[0] < n, step, start)[2:]


@lowers(aten.linalg_ldl_factor_ex.default)
def linalg_ldl_factor_ex(out, a, *, hermitian=False, check_errors=False):
    if a.size == 0:
        return tuple(jnp.zeros(t.shape, t.dtype) for t in out)
    conj = hermitian and jnp.iscomplexobj(a)
    return _each_matrix(lambda m: _factor(m, conj), a, dims=(2,))


def _solve(ld, pivots, b, conj):
    """Solve for one matrix: D is inverted block by block between two triangular solves."""
    n = ld.shape[0]
    conjugate = jnp.conj if conj else (lambda x: x)
    rows = jnp.arange(n)

    # The interchanges that LAPACK left out of the earlier columns of L, and where the 2x2 blocks start.
    def step(k, state):
        factor, order, starts = state
        pivot = jnp.abs(pivots[k]) - 1
        start = (pivots[k] < 0) & ~jnp.where(k > 0, starts[k - 1], False)
        pivot = jnp.where(start, k, pivot)
        first_column = jnp.where(pivots[k] < 0, k - 1, k)
        moved = jnp.where(rows < first_column, _interchange(factor, k, pivot), factor)
        return moved, _interchange(order, k, pivot), starts.at[k].set(start)

    factor, order, starts = lax.fori_loop(0, n, step, (jnp.tril(ld, -1), rows, jnp.zeros(n, bool)))
    ends = jnp.roll(starts, 1)
    d = jnp.diagonal(ld)
    off = jnp.where(starts[:-1], jnp.diagonal(ld, -1), 0)
    factor = factor - jnp.diag(off, -1)
    # The partner of each row inside its block, and the element that links them.
    partner = jnp.where(starts, rows + 1, jnp.where(ends, rows - 1, rows)) % n
    lower = jnp.append(off, jnp.zeros(1, ld.dtype))
    link = jnp.where(ends, jnp.roll(lower, 1), conjugate(lower))[:, None]

    x = lax.linalg.triangular_solve(factor, b[order], left_side=True, lower=True, unit_diagonal=True)
    d, other = d[:, None], d[partner][:, None]
    # [[d, l], [l', o]] x = y with both rows divided by the links, as LAPACK does against overflow.
    safe = jnp.where(link == 0, 1, link)
    paired = ((other / conjugate(safe)) * (x / safe) - (x[partner] / conjugate(safe))) / (
        (d / safe) * (other / conjugate(safe)) - 1
    )
    x = jnp.where((starts | ends)[:, None], paired, x / d)
    x = lax.linalg.triangular_solve(
        factor, x, left_side=True, lower=True, unit_diagonal=True, transpose_a=True, conjugate_a=conj
    )
    return jnp.zeros_like(x).at[order].set(x)


@lowers(aten.linalg_ldl_solve.default)
def linalg_ldl_solve(out, ld, pivots, b, *, hermitian=False):
    if 0 in out.shape:
        return jnp.zeros(out.shape, out.dtype)
    batch = jnp.broadcast_shapes(ld.shape[:-2], b.shape[:-2])
    ld = jnp.broadcast_to(ld, (*batch, *ld.shape[-2:]))
    pivots = jnp.broadcast_to(pivots, ld.shape[:-1])
    b = jnp.broadcast_to(b, (*batch, *b.shape[-2:]))
    conj = hermitian and jnp.iscomplexobj(ld)
    return _each_matrix(lambda m, p, r: _solve(m, p, r, conj), ld, pivots, b, dims=(2, 1, 2))
