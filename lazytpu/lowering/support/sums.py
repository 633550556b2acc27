"""Sums over dimensions of arrays, on CPUs as products with ones: XLA's own loops take two to six times as long."""

import math

import jax.numpy as jnp
from jax import lax

from lazytpu.lowering.registry import on_mesh, on_one_cpu, target_platform

_LEAST = 4096  # elements from which on a product is worth its call
_LARGE = 1 << 16  # elements from which on a loop is worth its start
_HUGE = 1 << 26  # elements past which a sum is left to a loop, which need not have them in memory
_SHORTEST = 8  # terms, and sums, below which it is not
_LONGEST = 4096  # terms that one product adds up
_MANY = 1024  # terms from which on a sum is worth a product of its own; of more it adds up parts, for its accuracy
_BLOCK = 32  # what XLA's TreeReductionRewriter divides each dimension of a sum into
_MOST_IN_A_BLOCK = 1024


def in_stages(x, axes=None, keepdims=False):
    """Return the sum of ``x`` over some axes, all by default; on CPUs over so many at a time that it is accurate.

    XLA adds up the elements of blocks one after the other, and makes them up to 32 long in each dimension: 98,304
    elements of a batch of images.  Their mean was off by 1e-5 of it, that of equal numbers by 6e-4.  Many terms are
    added by a product, in a fifth of the time, so that what is summed is in memory first, as in eager.
    """
    axes = sorted(a % x.ndim for a in (range(x.ndim) if axes is None else axes))
    shape = [1 if d in axes else n for d, n in enumerate(x.shape)] if keepdims else None
    last = _last_of(axes, x.ndim)
    if _may_be_product(x) and _LARGE <= x.size <= _HUGE and math.prod(x.shape[a] for a in last) >= _MANY:
        product = _sum_over_last(x, len(last))
        if product is not None:
            x, axes = product, axes[: -len(last)]
    if target_platform() == "cpu" and jnp.issubdtype(x.dtype, jnp.inexact):
        stage = []
        for axis in reversed(axes):  # those before it keep their numbers
            if math.prod(min(x.shape[a], _BLOCK) for a in (axis, *stage)) > _MOST_IN_A_BLOCK and stage:
                x, stage = lax.optimization_barrier(lax.reduce_sum(x, stage)), []
            stage.insert(0, axis)
        axes = stage
    total = lax.reduce_sum(x, axes)
    return lax.reshape(total, shape) if shape else total


def total(x, axes, keepdims=False):
    """Return the sum of ``x`` over some axes, in its dtype.

    Right where ``x`` and what it is computed from are in memory anyway, as around convolutions.  Between matrix
    products it is not: the product reads ``x`` reshaped, and XLA computes what stands before a reshape once for each
    reader.
    """
    axes = tuple(sorted(a % x.ndim for a in axes))
    result = _product_on_mesh(x, axes) if on_mesh() else _product_with_ones(x, axes)
    result = in_stages(x, axes) if result is None else result
    return lax.expand_dims(result, axes) if keepdims else result


def mean(x, axes):
    """Return the mean over some axes, which stay as dimensions of size one."""
    return total(x, axes, keepdims=True) / math.prod(x.shape[a] for a in axes)


def weighted(x, weight, axes):
    """Return the sum of ``x * weight`` over the last axes, which stay as dimensions of size one; None weighs all alike.

    Right where `total` is.
    """
    terms = math.prod(x.shape[a] for a in axes)
    if weight is None or not _may_be_product(x) or not _SHORTEST <= terms <= _LONGEST:
        return total(x if weight is None else x * weight, axes, keepdims=True)
    sums = lax.dot(x.reshape(-1, terms), weight.reshape(terms), precision="highest")
    return sums.reshape(*x.shape[: axes[0]], *[1] * len(axes))


def _product_on_mesh(x, axes):
    """Return the sum over the first axes, or over the last one, on a mesh of CPUs; None where it is another one.

    As products of which nothing is reshaped: XLA can divide them however ``x`` lies, and computes ``x`` once.
    """
    if not axes or target_platform() != "cpu" or x.dtype not in (jnp.float32, jnp.float64):
        return None
    last = axes[-1]
    alike = axes == (x.ndim - 1,) or axes == tuple(range(last + 1)) and last + 1 < x.ndim
    if not (alike and x.size >= _LEAST and _SHORTEST <= x.shape[last] <= _LONGEST):
        return None
    each = axes[:-1] or tuple(range(last - 1))  # dimensions of which the elements are multiplied one by one
    ones = jnp.ones([x.shape[d] for d in (*each, last)], x.dtype)
    return lax.reduce_sum(
        lax.dot_general(x, ones, (((last,), (len(each),)), (each, tuple(range(len(each))))), precision="highest"),
        axes[:-1],
    )


def _may_be_product(x):
    return on_one_cpu() and x.dtype in (jnp.float32, jnp.float64) and x.size >= _LEAST


def _product_with_ones(x, axes):
    """Return the sum as a product, or None where XLA's loop is as good."""
    if not (_may_be_product(x) and axes):
        return None
    last = _last_of(axes, x.ndim)
    if last and len(last) < len(axes):
        return total(total(x, last), axes[: -len(last)])
    terms, size = math.prod(x.shape[i] for i in axes), tuple(n for i, n in enumerate(x.shape) if i not in axes)
    results = math.prod(size)
    if min(terms, results) < _SHORTEST:
        return None
    if last:
        return _sum_over_last(x, len(last))
    if terms > _LONGEST or axes != tuple(range(len(axes))):
        return None
    matrix = x.reshape(terms, results)
    return lax.dot(jnp.ones(terms, x.dtype), matrix, precision="highest").reshape(size)


def _last_of(axes, ndim):
    """Return those of some axes behind which none is kept."""
    return [a for a in axes if all(d in axes for d in range(a, ndim))]


def _sum_over_last(x, count):
    """Return the sum over the last ``count`` dimensions as a product; None where they cannot be divided into parts."""
    size, terms = x.shape[:-count], math.prod(x.shape[-count:])
    part = max(n for n in range(1, min(terms, _MANY) + 1) if terms % n == 0)
    if part < _SHORTEST:
        return None
    sums = lax.dot(x.reshape(x.size // part, part), jnp.ones(part, x.dtype), precision="highest")
    return lax.reduce_sum(sums.reshape(*size, terms // part), (len(size),))


def total_of_rows(x):
    """Return the sum over all dimensions but the last.

    For what is read by products too.  The loop is there for its operand, which XLA puts in memory for it: it would
    compute what stands before a reshape once for each reader, for some of them column by column.
    """
    rows, parts = x.size // max(x.shape[-1], 1), next((n for n in (2, 3, 5, 7) if x.ndim > 1 and len(x) % n == 0), 0)
    if not (on_one_cpu() and x.dtype in (jnp.float32, jnp.float64) and x.size >= _LARGE and parts and rows <= _LONGEST):
        axes = tuple(range(x.ndim - 1))
        product = _product_on_mesh(x, axes) if on_mesh() else None
        return in_stages(x, axes) if product is None else product
    ones, count = jnp.ones(rows // parts, x.dtype), len(x) // parts

    def body(i, sums):
        part = lax.dynamic_slice_in_dim(x, i * count, count, 0)
        return sums + lax.dot(ones, part.reshape(rows // parts, -1), precision="highest")

    return lax.fori_loop(0, parts, body, jnp.zeros(x.shape[-1], x.dtype))
