"""Products of groups of rows, as experts of a mixture take them, and of float8 with scales.

Where a group ends stands in a tensor, so the sizes of groups are no sizes of the program.  Rows are taken some at a
time, each block of one group: a loop over as many blocks as there can be computes little more than the products.
"""

from __future__ import annotations

import jax.numpy as jnp
import torch
from jax import lax

from lazytpu.errors import UnsupportedOpError
from lazytpu.lowering.registry import lowers, target_platform
from lazytpu.lowering.rules.matmul import product
from lazytpu.lowering.support.operands import compute_dtype

aten = torch.ops.aten

_MOST_ROWS = 128  # of a block


class _Blocks:
    """Blocks of consecutive rows, none of which belong to two groups.

    Attributes:
        rows: of a block, at most.
        count: how many there are at most; those that are not needed begin behind the last row.
        groups, firsts, ends: of each block: its group, its first row and the end of its group.
    """

    def __init__(self, total, offs):
        groups = offs.shape[0]
        some = -(-total // max(1, groups))
        self.rows = min(_MOST_ROWS, 1 << max(0, some - 1).bit_length())
        self.count = (total + min(groups, total) * (self.rows - 1)) // self.rows
        ends = jnp.minimum(offs.astype(jnp.int32), total)
        starts = jnp.concatenate([jnp.zeros(1, jnp.int32), ends[:-1]])
        last = jnp.cumsum((jnp.maximum(ends - starts, 0) + self.rows - 1) // self.rows)
        number = jnp.arange(self.count, dtype=jnp.int32)
        group = jnp.searchsorted(last, number, side="right")
        self.groups = jnp.minimum(group, groups - 1).astype(jnp.int32)
        within = number - jnp.concatenate([jnp.zeros(1, last.dtype), last[:-1]])[self.groups]
        self.firsts = jnp.where(group < groups, starts[self.groups] + within * self.rows, total).astype(jnp.int32)
        self.ends = ends[self.groups]

    def loop(self, step, start):
        """Return what ``step`` (what there is, group, first row, end) makes of ``start``, block by block."""

        def each(made, block):
            return step(made, *block), None

        return lax.scan(each, start, (self.groups, self.firsts, self.ends))[0]


def _padded(x, dim, rows):
    return jnp.pad(x, [(0, rows if d == dim else 0) for d in range(x.ndim)])


def _rows_times_matrices(out, x, weights, offs):
    """Return each row of ``x`` [rows, k] times the matrix of its group in [groups, k, n]; rows of no group are zero."""
    grouped = jnp.arange(out.shape[0])[:, None] < offs[-1]
    if target_platform() == "tpu":
        sizes = jnp.diff(offs, prepend=jnp.zeros(1, offs.dtype)).astype(jnp.int32)
        wide = compute_dtype(out.dtype)
        if x.dtype != jnp.bfloat16:
            x, weights = x.astype(wide), weights.astype(wide)
        # jax's kernel refuses bfloat16 with a precision, and float16
        precision = lax.Precision.DEFAULT if x.dtype == jnp.bfloat16 else None
        found = lax.ragged_dot(x, weights, sizes, precision, preferred_element_type=wide).astype(out.dtype)
        return jnp.where(grouped, found, 0)
    blocks = _Blocks(x.shape[0], offs)
    x = _padded(x, 0, blocks.rows)

    def step(made, group, first, _):
        # rows behind the end of the group are computed too, and overwritten by the next block
        some = lax.dynamic_slice_in_dim(x, first, blocks.rows, 0)
        found = product(some, lax.dynamic_index_in_dim(weights, group, 0, False), ((1,), (0,)), dtype=out.dtype)
        return lax.dynamic_update_slice_in_dim(made, found.astype(out.dtype), first, 0)

    made = blocks.loop(step, jnp.zeros((x.shape[0], out.shape[1]), out.dtype))
    return jnp.where(grouped, made[: out.shape[0]], 0)


def _sums_by_group(out, x, y, offs):
    """Return for each group the product of its columns of ``x`` [m, rows] with its rows of ``y`` [rows, n]."""
    blocks = _Blocks(y.shape[0], offs)
    x, y, wide = _padded(x, 1, blocks.rows), _padded(y, 0, blocks.rows), compute_dtype(out.dtype)

    def step(made, group, first, end):
        own = first + jnp.arange(blocks.rows) < end
        columns = jnp.where(own, lax.dynamic_slice_in_dim(x, first, blocks.rows, 1), 0)
        rows = jnp.where(own[:, None], lax.dynamic_slice_in_dim(y, first, blocks.rows, 0), 0)
        found = product(columns, rows, ((1,), (0,)), dtype=out.dtype)
        return lax.dynamic_update_index_in_dim(made, lax.dynamic_index_in_dim(made, group, 0, False) + found, group, 0)

    return blocks.loop(step, jnp.zeros(out.shape, wide)).astype(out.dtype)


@lowers(aten._grouped_mm.default)
def grouped_mm(out, a, b, offs=None, bias=None, out_dtype=None):
    if out.size == 0 or a.shape[-1] == 0:
        return jnp.zeros(out.shape, out.dtype)
    if a.ndim == 3 and b.ndim == 3:
        return product(a, b, ((2,), (1,)), ((0,), (0,)), dtype=out.dtype).astype(out.dtype)
    if a.ndim == 2 and b.ndim == 2:
        return _sums_by_group(out, a, b, offs)
    if a.ndim == 2:
        return _rows_times_matrices(out, a, b, offs)
    turned = jnp.zeros(out.shape[::-1], out.dtype)
    return _rows_times_matrices(turned, b.T, jnp.swapaxes(a, 1, 2), offs).T


def _spread(scale, shape):
    """Return a scale for each element: of the tensor, of a row or column, or of a block of up to 128."""
    if scale.size == 1:
        return scale.reshape(())
    for dim, (blocks, size) in enumerate(zip(scale.shape, shape, strict=True)):
        if 1 < blocks < size:
            scale = jnp.repeat(scale, 128, dim)[tuple(slice(size if d == dim else None) for d in range(scale.ndim))]
    return scale


_GREATEST = float(jnp.finfo(jnp.float8_e4m3fn).max)


@lowers(aten._scaled_mm.default)
def scaled_mm(out, a, b, scale_a, scale_b, bias=None, scale_result=None, out_dtype=None, use_fast_accum=False):
    a = a.astype(jnp.float32) * _spread(scale_a, a.shape)
    b = b.astype(jnp.float32) * _spread(scale_b, b.shape)
    found = product(a, b, ((1,), (0,)))
    if bias is not None:
        found = found + bias.astype(jnp.float32)
    if scale_result is not None and out.dtype.itemsize == 1:
        found = found / scale_result.reshape(())
    if out.dtype == jnp.float8_e4m3fn:  # which has no infinities
        found = jnp.clip(found, -_GREATEST, _GREATEST)
    return found.astype(out.dtype)


_WHOLE, _BY_ROW = 0, 1  # of torch's ScalingType


@lowers(aten._scaled_mm_v2.default)
def scaled_mm_v2(
    out, a, b, scale_a, recipe_a, _, scale_b, recipe_b, __, bias=None, out_dtype=None, dims=(), fast=False
):
    """Lower ``F.scaled_mm``, with a scale of the whole matrix or one for each row of ``a`` and column of ``b``."""
    for recipe in (*recipe_a, *recipe_b):
        if recipe not in (_WHOLE, _BY_ROW):
            raise UnsupportedOpError(f"F.scaled_mm with ScalingType({recipe}): whole tensors and rows have scales here")
    by_row = scale_a[0].reshape(-1, 1) if recipe_a[0] == _BY_ROW else scale_a[0].reshape(())
    by_column = scale_b[0].reshape(1, -1) if recipe_b[0] == _BY_ROW else scale_b[0].reshape(())
    return scaled_mm(out, a, b, by_row, by_column, bias)
