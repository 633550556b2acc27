"""Writing through a view: ``slice_scatter`` and its kin, and the gradients of the views that pick a part."""

from __future__ import annotations

import jax.numpy as jnp
import torch
from jax import lax

from lazytpu.lowering.registry import lowers
from lazytpu.lowering.rules.indexing import scatter_along
from lazytpu.lowering.rules.shape import axis_of, first_index, is_static, strided_extent, strided_index, strided_order

aten = torch.ops.aten


def _placed(x, part, axis, start, step=1):
    """Return ``x`` with ``part`` written from ``start`` on along ``axis``, every ``step`` places."""
    if part.size == 0:
        return x
    if step > 1:
        gaps = [(0, 0, step - 1 if d == axis else 0) for d in range(x.ndim)]
        part = lax.pad(part, jnp.zeros((), part.dtype), gaps)
        between = lax.dynamic_slice_in_dim(x, start, part.shape[axis], axis)
        written = lax.rem(lax.broadcasted_iota(jnp.int32, part.shape, axis), jnp.int32(step)) == 0
        part = lax.select(written, part, between)
    return lax.dynamic_update_slice_in_dim(x, part, start, axis)


@lowers(aten.slice_scatter.default, dynamic="start end")
def slice_scatter(out, x, src, dim=0, start=None, end=None, step=1):
    axis = axis_of(dim, x.ndim)
    return _placed(x, lax.convert_element_type(src, x.dtype), axis, first_index(start, x.shape[axis]), step)


@lowers(aten.select_scatter.default, dynamic="index")
def select_scatter(out, x, src, dim, index):
    axis = axis_of(dim, x.ndim)
    src = lax.expand_dims(jnp.broadcast_to(src, x.shape[:axis] + x.shape[axis + 1 :]), [axis])
    return _placed(x, lax.convert_element_type(src, x.dtype), axis, first_index(index, x.shape[axis]))


@lowers(aten.slice_backward.default, dynamic="start end")
def slice_backward(out, grad, input_sizes, dim, start, end, step):
    axis = axis_of(dim, grad.ndim)
    size, length = out.shape[axis], grad.shape[axis]
    start = first_index(start, size)
    if grad.size == 0 or not is_static(start):
        return _placed(jnp.zeros(out.shape, out.dtype), grad, axis, start, step)
    ends = [(0, 0, 0)] * grad.ndim
    ends[axis] = (start, size - start - (length - 1) * step - 1, step - 1)
    return lax.pad(grad, jnp.zeros((), out.dtype), ends)


@lowers(aten.select_backward.default, dynamic="index")
def select_backward(out, grad, input_sizes, dim, index):
    axis = axis_of(dim, len(out.shape))
    return slice_backward(out, lax.expand_dims(grad, [axis]), input_sizes, axis, index, None, 1)


@lowers(aten.diagonal_scatter.default)
def diagonal_scatter(out, x, src, offset=0, dim1=0, dim2=1):
    x = jnp.moveaxis(x, (dim1, dim2), (-2, -1))
    rows, length, above = x.shape[-2], src.shape[-1], max(-offset, 0)
    if src.size == 0:
        return jnp.moveaxis(x, (-2, -1), (dim1, dim2))
    # the element of each row, then the same along the row, kept where the diagonal passes
    ends = [(0, 0, 0)] * (src.ndim - 1) + [(above, rows - above - length, 0)]
    by_row = lax.pad(lax.convert_element_type(src, x.dtype), jnp.zeros((), x.dtype), ends)
    by_row = lax.broadcast_in_dim(by_row, x.shape, range(x.ndim - 1))
    row, col = (lax.broadcasted_iota(jnp.int32, x.shape, d) for d in (x.ndim - 2, x.ndim - 1))
    x = lax.select(col - row == offset, by_row, x)
    return jnp.moveaxis(x, (-2, -1), (dim1, dim2))


@lowers(aten.diagonal_backward.default)
def diagonal_backward(out, grad, input_sizes, offset, dim1, dim2):
    return diagonal_scatter(out, jnp.zeros(out.shape, out.dtype), grad, offset, dim1, dim2)


@lowers(aten.diag_embed.default)
def diag_embed(out, x, offset=0, dim1=-2, dim2=-1):
    return diagonal_scatter(out, jnp.zeros(out.shape, out.dtype), x, offset, dim1, dim2)


@lowers(aten.as_strided_scatter.default, dynamic="storage_offset")
def as_strided_scatter(out, x, src, size, stride, storage_offset=None):
    if src.size == 0:
        return x
    memory, src = lax.reshape(x, (x.size,)), lax.convert_element_type(src, x.dtype)
    offset = 0 if storage_offset is None else storage_offset
    order = strided_order(size, stride)
    if order is not None and strided_extent(size, stride) == src.size:  # a permutation of one piece of memory
        ones = [d for d in range(src.ndim) if d not in order]
        piece = lax.reshape(lax.transpose(src, [*ones, *order]), (src.size,))
        memory = lax.dynamic_update_slice_in_dim(memory, piece, offset, 0)
    else:
        places = strided_index(tuple(size), stride).reshape(-1) + offset
        memory = scatter_along(memory, 0, places, src.reshape(-1))
    return lax.reshape(memory, x.shape)


@lowers(aten.value_selecting_reduction_backward.default)
def value_selecting_reduction_backward(out, grad, dim, indices, sizes, keepdim):
    zeros = jnp.zeros(out.shape, out.dtype)
    if not keepdim and out.shape:
        axis = [axis_of(dim, len(out.shape))]
        grad, indices = lax.expand_dims(grad, axis), lax.expand_dims(indices, axis)
    return scatter_along(zeros, dim, indices, grad)
