"""Matrix products: mm, bmm, addmm and their relatives, linear, bilinear.

Half-precision products accumulate in float32 and are rounded once, as eager torch does on the CPU.
"""

import jax
import jax.numpy as jnp
import torch
from jax import lax

from lazytpu.lowering.registry import lowers
from lazytpu.lowering.support import sums, wide_products
from lazytpu.lowering.support.operands import compute_dtype, rounded

aten = torch.ops.aten


def product(a, b, contract, batch=((), ()), dtype=None):
    """Return ``lax.dot_general`` accumulated in the type eager computes ``dtype`` (default: that of ``a``) in."""
    dtype = a.dtype if dtype is None else dtype
    return wide_products.dot(a, b, (contract, batch), compute_dtype(dtype))


def scaled(x, factor, dtype):
    """Return ``factor * x`` in ``dtype``; nothing where the factor is the constant 1."""
    x = lax.convert_element_type(x, dtype)
    if isinstance(factor, int | float) and factor == 1:
        return x
    return lax.mul(x, jnp.broadcast_to(lax.convert_element_type(factor, dtype), x.shape))


def _hidden_by_zero(x, factor):
    """Return ``x``, or zeros where ``factor`` is zero: the BLAS rule, which hides NaN and infinities."""
    if not isinstance(factor, int | float):
        return lax.select(jnp.broadcast_to(factor == 0, x.shape), lax.full_like(x, 0), x)
    return x if factor else lax.full_like(x, 0)


def add_scaled(out, x, y, beta, alpha):
    """Return ``beta * x + alpha * y`` rounded once; a factor of zero hides NaN, that of ``y`` only without rounding."""
    dtype = compute_dtype(out.dtype)
    y = scaled(y, alpha, dtype)
    if dtype == out.dtype:
        y = _hidden_by_zero(y, alpha)
    x = _hidden_by_zero(jnp.broadcast_to(scaled(x, beta, dtype), out.shape), beta)
    return lax.convert_element_type(lax.add(x, y), out.dtype)


@lowers(aten.mm.default, aten.mm.dtype)
def mm(out, a, b, out_dtype=None):
    return lax.convert_element_type(product(a, b, ((1,), (0,)), dtype=out.dtype), out.dtype)


@lowers(aten._int_mm.default)
def int_mm(out, a, b):
    """Return products of int8, which stay int8 in the program."""
    return lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=out.dtype)


@lowers(aten.bmm.default, aten.bmm.dtype)
def bmm(out, a, b, out_dtype=None):
    return lax.convert_element_type(product(a, b, ((2,), (1,)), ((0,), (0,)), dtype=out.dtype), out.dtype)


@lowers(aten.mv.default)
def mv(out, a, v):
    return lax.convert_element_type(product(a, v, ((1,), (0,))), out.dtype)


@lowers(aten.dot.default)
def dot(out, a, b):
    return lax.convert_element_type(product(a, b, ((0,), (0,))), out.dtype)


@lowers(aten.vdot.default)
def vdot(out, a, b):
    return dot(out, jnp.conj(a), b)


@lowers(aten.addmm.default, aten.addmm.dtype)
def addmm(out, x, a, b, out_dtype=None, *, beta=1, alpha=1):
    return add_scaled(out, x, product(a, b, ((1,), (0,)), dtype=out.dtype), beta, alpha)


@lowers(aten._addmm_activation.default)
def addmm_activation(out, x, a, b, *, beta=1, alpha=1, use_gelu=False):
    wide = jax.ShapeDtypeStruct(out.shape, compute_dtype(out.dtype))
    y = addmm(wide, x, a, b, beta=beta, alpha=alpha)
    y = jax.nn.gelu(y, approximate=True) if use_gelu else lax.max(y, lax.full_like(y, 0))
    return lax.convert_element_type(y, out.dtype)


@lowers(aten.baddbmm.default, aten.baddbmm.dtype)
def baddbmm(out, x, a, b, out_dtype=None, *, beta=1, alpha=1):
    return add_scaled(out, x, product(a, b, ((2,), (1,)), ((0,), (0,)), dtype=out.dtype), beta, alpha)


@lowers(aten.addbmm.default)
def addbmm(out, x, a, b, *, beta=1, alpha=1):
    if compute_dtype(out.dtype) == out.dtype or a.shape[0] < 2:
        return add_scaled(out, x, product(a, b, ((0, 2), (0, 1))), beta, alpha)
    first = add_scaled(out, x, product(a[0], b[0], ((1,), (0,))), beta, alpha)  # eager rounds after each matrix

    def step(total, pair):
        return add_scaled(out, total, product(*pair, ((1,), (0,))), 1, alpha), None

    return lax.scan(step, first, (a[1:], b[1:]))[0]


@lowers(aten.addmv.default)
def addmv(out, x, a, v, *, beta=1, alpha=1):
    return add_scaled(out, x, product(a, v, ((1,), (0,))), beta, alpha)


@lowers(aten.addr.default)
def addr(out, x, u, v, *, beta=1, alpha=1):
    if out.dtype == jnp.bool_:
        outer = u[:, None] & v[None, :] & jnp.asarray(alpha, bool)
        return jnp.broadcast_to(x & jnp.asarray(beta, bool), out.shape) | outer
    dtype = compute_dtype(out.dtype)
    if dtype == out.dtype:
        return add_scaled(out, x, scaled(u[:, None] * v[None, :], alpha, dtype), beta, 1)
    # eager rounds after each operation
    x, u, v, beta, alpha = (rounded(jnp.asarray(t, dtype), out.dtype) for t in (x, u, v, beta, alpha))
    outer = rounded(rounded(alpha * u, out.dtype)[:, None] * v[None, :], out.dtype)
    return lax.convert_element_type(jnp.broadcast_to(rounded(beta * x, out.dtype), out.shape) + outer, out.dtype)


@lowers(aten.matmul.default)
def matmul(out, a, b):
    batch = tuple(range(b.ndim - 2))
    if a.ndim < 2 or b.ndim < 2 or a.shape[: b.ndim - 2] != b.shape[:-2]:
        y = jnp.matmul(a, b, preferred_element_type=compute_dtype(out.dtype))
    else:
        y = product(a, b, ((a.ndim - 1,), (b.ndim - 2,)), (batch, batch))
    return lax.convert_element_type(y, out.dtype)


@lowers(aten.matmul_backward.default)
def matmul_backward(out, grad, a, b, mask):
    last, batch = b.ndim - 1, tuple(range(b.ndim - 2))
    rows = tuple(range(len(batch), grad.ndim - 1))
    da = product(grad, b, ((grad.ndim - 1,), (last,)), (batch, batch)) if mask[0] else None
    db = product(a, grad, (rows, rows), (batch, batch)) if mask[1] else None
    return [None if x is None else lax.convert_element_type(x, o.dtype) for x, o in zip((da, db), out, strict=True)]


@lowers(aten.linear.default)
def linear(out, x, weight, bias=None):
    y = product(x, weight, ((x.ndim - 1,), (weight.ndim - 1,)))
    return lax.convert_element_type(y, out.dtype) if bias is None else add_scaled(out, bias, y, 1, 1)


@lowers(aten.linear_backward.default)
def linear_backward(out, x, grad, weight, output_mask):
    dx, dw, db = out
    rows = tuple(range(grad.ndim - 1))
    return (
        product(grad, weight, ((grad.ndim - 1,), (0,))).astype(dx.dtype) if output_mask[0] else None,
        product(grad, x, (rows, rows)).astype(dw.dtype) if output_mask[1] else None,
        sums.total_of_rows(grad.astype(compute_dtype(grad.dtype))).astype(db.dtype) if output_mask[2] else None,
    )


@lowers(aten._trilinear.default)
def trilinear(out, a, b, c, expand1, expand2, expand3, sumdim, unroll_dim=1):
    letters = "abcdefghijklmnopqrstuvwxyz"[: a.ndim + len(expand1)]

    def without(gone):
        return "".join(x for i, x in enumerate(letters) if i not in gone)

    of_a, of_b, of_c, result = map(without, (expand1, expand2, expand3, sumdim))
    a, b, c = (lax.convert_element_type(x, compute_dtype(out.dtype)) for x in (a, b, c))
    return lax.convert_element_type(jnp.einsum(f"{of_a},{of_b},{of_c}->{result}", a, b, c), out.dtype)
