"""Views and their ``_copy`` forms, and the ops that only move elements: cat, flip, roll, pads, shuffles.

A view reaches a rule by its aten name but works on a logical array: strides do not exist here.  The one
exception is ``as_strided``, which is recorded on the flat memory of a tensor: its operand is read as
row-major memory.
"""

from __future__ import annotations

import math
from itertools import accumulate, groupby

import jax
import jax.numpy as jnp
import torch
from jax import lax

from lazytpu.dtypes import to_numpy
from lazytpu.lowering.registry import lowers, lowers_each

aten = torch.ops.aten
_MANY = 8  # operands in a row that are the same array


def axis_of(dim, ndim):
    """Return a non-negative axis for a torch dim; 0 for a 0-d tensor."""
    return dim % max(ndim, 1)


def is_static(number):
    """Return whether a dynamic argument is known while lowering."""
    return number is None or isinstance(number, int)


def first_index(start, size):
    """Return where a slice of a dimension of ``size`` starts: negative starts count from the end, then clamp."""
    if is_static(start):
        start = start or 0
        return min(max(start + size if start < 0 else start, 0), size)
    start = lax.convert_element_type(start, jnp.int64)
    return lax.clamp(jnp.int64(0), jnp.where(start < 0, start + size, start), jnp.int64(size))


def _same(out, x, *_, **__):
    return x


def _reshaped(out, x, *_, **__):
    return lax.reshape(x, out.shape)


lowers_each(
    {
        **dict.fromkeys((aten.alias.default, aten.detach.default, aten.alias_copy.default), _same),
        **dict.fromkeys((aten.view.default, aten._unsafe_view.default, aten.view_copy.default), _reshaped),
        **dict.fromkeys((aten._reshape_alias.default, aten._reshape_copy.default), _reshaped),
        **dict.fromkeys((aten._reshape_alias_copy.default, aten.unsqueeze.default), _reshaped),
        **dict.fromkeys((aten.unsqueeze_copy.default, aten.squeeze_copy.default), _reshaped),
        **dict.fromkeys((aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims), _reshaped),
        **dict.fromkeys((aten.squeeze_copy.dim, aten.squeeze_copy.dims), _reshaped),
    }
)


@lowers(aten.permute.default, aten.permute_copy.default)
def permute(out, x, dims):
    return lax.transpose(x, [axis_of(d, x.ndim) for d in dims])


@lowers(aten.transpose.int, aten.transpose_copy.int)
def transpose(out, x, dim0, dim1):
    order = list(range(x.ndim))
    if order:
        order[dim0], order[dim1] = order[dim1], order[dim0]
    return lax.transpose(x, order)


@lowers(aten.t.default, aten.t_copy.default)
def t(out, x):
    return lax.transpose(x, range(x.ndim)[::-1])


@lowers(aten.expand.default, aten.expand_copy.default)
def expand(out, x, size, *, implicit=False):
    return lax.broadcast_in_dim(x, out.shape, range(len(out.shape) - x.ndim, len(out.shape)))


@lowers(aten.select.int, dynamic="index")
def select(out, x, dim, index):
    pick = lax.index_in_dim if is_static(index) else lax.dynamic_index_in_dim
    return pick(x, index, axis_of(dim, x.ndim), keepdims=False)


@lowers(aten.slice.Tensor, dynamic="start end")
def slice_(out, x, dim=0, start=None, end=None, step=1):
    axis = axis_of(dim, x.ndim)
    length = out.shape[axis]
    if length == 0:
        return jnp.zeros(out.shape, out.dtype)
    start, reach = first_index(start, x.shape[axis]), (length - 1) * step + 1
    if is_static(start):
        return lax.slice_in_dim(x, start, start + reach, step, axis)
    return lax.slice_in_dim(lax.dynamic_slice_in_dim(x, start, reach, axis), 0, reach, step, axis)


@lowers(aten.narrow_copy.default, dynamic="start")
def narrow_copy(out, x, dim, start, length):
    return slice_(out, x, dim, start)


@lowers(
    aten.split.Tensor,
    aten.split_copy.Tensor,
    aten.split_with_sizes.default,
    aten.split_with_sizes_copy.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
)
def split(out, x, sizes, dim=0):
    axis = axis_of(dim, x.ndim)
    ends = accumulate(piece.shape[axis] for piece in out)
    return [lax.slice_in_dim(x, end - piece.shape[axis], end, axis=axis) for piece, end in zip(out, ends, strict=True)]


@lowers(aten.unbind.int, aten.unbind_copy.int)
def unbind(out, x, dim=0):
    axis = axis_of(dim, x.ndim)
    return [lax.index_in_dim(x, i, axis, keepdims=False) for i in range(x.shape[axis])]


@lowers(aten.diagonal.default, aten.diagonal_copy.default)
def diagonal(out, x, offset=0, dim1=0, dim2=1):
    x = jnp.moveaxis(x, (dim1, dim2), (-2, -1))
    *outer, rows, cols = x.shape
    if 0 in out.shape:
        return jnp.zeros(out.shape, out.dtype)
    first = offset if offset >= 0 else -offset * cols
    flat = lax.reshape(x, (*outer, rows * cols))
    return lax.slice_in_dim(flat, first, first + (out.shape[-1] - 1) * (cols + 1) + 1, cols + 1, axis=-1)


@lowers(aten.unfold.default, aten.unfold_copy.default)
def unfold(out, x, dimension, size, step):
    if x.ndim == 0:
        return jnp.broadcast_to(x, out.shape)
    axis = axis_of(dimension, x.ndim)
    if 0 in out.shape:
        return jnp.zeros(out.shape, out.dtype)
    windows = out.shape[axis]
    if size <= windows:
        reach = (windows - 1) * step + 1
        pieces = [lax.slice_in_dim(x, i, i + reach, step, axis) for i in range(size)]
        return lax.concatenate([lax.expand_dims(p, [x.ndim]) for p in pieces], x.ndim)
    pieces = [lax.slice_in_dim(x, i * step, i * step + size, 1, axis) for i in range(windows)]
    return jnp.moveaxis(lax.concatenate([lax.expand_dims(p, [axis]) for p in pieces], axis), axis + 1, -1)


@lowers(aten.unfold_backward.default)
def unfold_backward(out, grad, input_sizes, dim, size, step):
    start = jnp.zeros(out.shape, out.dtype)
    if 0 in grad.shape:
        return start
    if not jnp.issubdtype(out.dtype, jnp.inexact):  # what writes through an unfolded view of integers calls this, too
        if not input_sizes:
            return lax.reshape(grad, ())
        axis = axis_of(dim, len(input_sizes))
        places = jnp.arange(grad.shape[axis])[:, None] * step + jnp.arange(size)
        spread = jnp.moveaxis(start, axis, -1).at[..., places]
        windows = jnp.moveaxis(grad, axis, -2)
        return jnp.moveaxis(spread.max(windows) if out.dtype == jnp.bool_ else spread.add(windows), -1, axis)
    _, back = jax.vjp(lambda x: unfold(grad, x, dim, size, step), start)
    return back(grad)[0]


def strided_extent(size, stride):
    """Return how many elements of memory a strided tensor spans."""
    return 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))


def strided_order(size, stride):
    """Return the dims from outermost to innermost when each dim steps over all that is inside it, else None."""
    order = sorted((d for d, n in enumerate(size) if n > 1 and stride[d] > 0), key=lambda d: -stride[d])
    inner = 1
    for d in reversed(order):
        if stride[d] < inner:
            return None
        inner += (size[d] - 1) * stride[d]
    return order


def strided_index(size, stride):
    """Return the index in memory of every element, as i64 of shape ``size``."""
    steps = (lax.broadcasted_iota(jnp.int64, size, d) * s for d, s in enumerate(stride) if s)
    return sum(steps, start=jnp.zeros(size, jnp.int64))


@lowers(aten.as_strided.default, aten.as_strided_copy.default, dynamic="storage_offset")
def as_strided(out, x, size, stride, storage_offset=None):
    if 0 in out.shape:
        return jnp.zeros(out.shape, out.dtype)
    extent, order = strided_extent(size, stride), strided_order(size, stride)
    memory, offset = lax.reshape(x, (x.size,)), 0 if storage_offset is None else storage_offset
    if is_static(offset):
        memory = lax.slice_in_dim(memory, offset, offset + extent)
    else:
        memory = lax.dynamic_slice_in_dim(memory, offset, extent)
    if order is None:
        return jnp.take(memory, strided_index(out.shape, stride), mode="clip")
    for d in order:  # the last axis holds what is not yet split into dims
        inner = memory.shape[-1] - (size[d] - 1) * stride[d]
        rest = [(0, 0, 0)] * (memory.ndim - 1)
        memory = lax.pad(memory, jnp.zeros((), x.dtype), [*rest, (0, stride[d] - inner, 0)])
        memory = lax.reshape(memory, (*memory.shape[:-1], size[d], stride[d]))
        memory = lax.slice_in_dim(memory, 0, inner, axis=-1)
    sizes = [size[d] for d in order]
    rank = sorted(range(len(order)), key=order.__getitem__)
    return lax.broadcast_in_dim(lax.transpose(lax.reshape(memory, sizes), rank), out.shape, sorted(order))


@lowers(aten.view.dtype, aten.view_copy.dtype)
def view_dtype(out, x, dtype):
    old, new = x.dtype, to_numpy(dtype)
    if old == new:
        return x
    if jnp.issubdtype(old, jnp.complexfloating):
        x = jnp.stack([lax.real(x), lax.imag(x)], -1)
        x = lax.reshape(x, (*x.shape[:-2], x.shape[-2] * 2)) if x.ndim > 1 else x
        return view_dtype(out, x, dtype)
    if jnp.issubdtype(new, jnp.complexfloating):
        half = jnp.float32 if new == jnp.complex64 else jnp.float64
        pair = jax.ShapeDtypeStruct((*out.shape[:-1], out.shape[-1] * 2), half)
        x = view_dtype(pair, x, torch.float32 if half == jnp.float32 else torch.float64)
        x = lax.reshape(x, (*out.shape, 2))
        return lax.complex(x[..., 0], x[..., 1])
    if old == jnp.bool_:
        return view_dtype(out, x.astype(jnp.uint8), dtype)
    if new == jnp.bool_:
        return view_dtype(jax.ShapeDtypeStruct(out.shape, jnp.uint8), x, torch.uint8) != 0
    if new.itemsize > old.itemsize:
        x = lax.reshape(x, (*out.shape, new.itemsize // old.itemsize))
        # without the barrier XLA folds a conversion of the result into one of x, which has another width
        return lax.optimization_barrier(lax.bitcast_convert_type(x, new))
    return lax.reshape(lax.bitcast_convert_type(x, new), out.shape)


@lowers(aten.cat.default)
def cat(out, tensors, dim=0):
    axis = axis_of(dim, len(out.shape))
    # torch lets an empty 1-d tensor join tensors of any rank
    return _joined([x for x in tensors if x.ndim == len(out.shape)], axis, out.dtype)


@lowers(aten.stack.default)
def stack(out, tensors, dim=0):
    axis = axis_of(dim, len(out.shape))
    added = {id(x): lax.expand_dims(x, [axis]) for x in tensors}
    return _joined([added[id(x)] for x in tensors], axis, out.dtype)


def _joined(tensors, axis, dtype):
    """Concatenate; what comes many times in a row, as the gradients of unused parts do, is one operand of XLA."""
    parts = []
    for _, group in groupby(tensors, id):
        x, *others = group
        x, times = lax.convert_element_type(x, dtype), 1 + len(others)
        parts += [_tiled(x, [times if i == axis else 1 for i in range(x.ndim)])] if times >= _MANY else [x] * times
    return lax.concatenate(parts, axis) if len(parts) > 1 else parts[0]


@lowers(aten.repeat.default)
def repeat(out, x, repeats):
    return _tiled(lax.reshape(x, (1,) * (len(repeats) - x.ndim) + x.shape), repeats)


def _tiled(x, repeats):
    tiled = [n for pair in zip(repeats, x.shape, strict=True) for n in pair]
    whole = [times * n for times, n in zip(repeats, x.shape, strict=True)]
    return lax.reshape(lax.broadcast_in_dim(x, tiled, range(1, 2 * x.ndim, 2)), whole)


@lowers(aten.flip.default)
def flip(out, x, dims):
    return lax.rev(x, [axis_of(d, x.ndim) for d in dims]) if x.ndim else x


@lowers(aten.roll.default)
def roll(out, x, shifts, dims=()):
    if x.size == 0:
        return x
    if not dims:
        flat = jax.ShapeDtypeStruct((x.size,), x.dtype)
        return lax.reshape(roll(flat, lax.reshape(x, (x.size,)), shifts, [0]), out.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        axis = axis_of(dim, x.ndim)
        cut = -shift % x.shape[axis]
        if cut:
            ends = lax.slice_in_dim(x, cut, None, axis=axis), lax.slice_in_dim(x, 0, cut, axis=axis)
            x = lax.concatenate(ends, axis)
    return x


@lowers(aten.rot90.default)
def rot90(out, x, k=1, dims=(0, 1)):
    return jnp.rot90(x, k, tuple(axis_of(d, x.ndim) for d in dims))


@lowers(aten.pixel_shuffle.default)
def pixel_shuffle(out, x, upscale_factor):
    *n, c, h, w = x.shape
    r, k = upscale_factor, len(n)
    x = lax.reshape(x, (*n, c // (r * r), r, r, h, w))
    return lax.reshape(lax.transpose(x, (*range(k), k, k + 3, k + 1, k + 4, k + 2)), out.shape)


@lowers(aten.pixel_unshuffle.default)
def pixel_unshuffle(out, x, downscale_factor):
    *n, c, h, w = x.shape
    r, k = downscale_factor, len(n)
    x = lax.reshape(x, (*n, c, h // r, r, w // r, r))
    return lax.reshape(lax.transpose(x, (*range(k), k, k + 2, k + 4, k + 1, k + 3)), out.shape)


@lowers(aten.channel_shuffle.default)
def channel_shuffle(out, x, groups):
    n, c, *rest = x.shape
    x = lax.reshape(x, (n, groups, c // groups, math.prod(rest)))
    return lax.reshape(lax.transpose(x, (0, 2, 1, 3)), out.shape)


@lowers(aten.block_diag.default)
def block_diag(out, tensors):
    rows, left, zero = [], 0, jnp.zeros((), out.dtype)
    for x in tensors:
        x = lax.convert_element_type(x, out.dtype)
        x = lax.reshape(x, (1,) * (2 - x.ndim) + x.shape)
        rows.append(lax.pad(x, zero, [(0, 0, 0), (left, out.shape[1] - left - x.shape[1], 0)]))
        left += x.shape[1]
    return lax.concatenate(rows, 0)
