"""Rows of different numbers, one after the other or padded: what nested tensors of the jagged layout are made of."""

import jax.numpy as jnp
import torch

from lazytpu.lowering.registry import lowers

aten = torch.ops.aten


@lowers(aten._jagged_to_padded_dense_forward.default)
def jagged_to_padded(out, values, offsets, max_lengths, padding_value=0.0):
    (offsets,) = offsets
    place = offsets[:-1, None] + jnp.arange(out.shape[1], dtype=offsets.dtype)
    inside = (place < offsets[1:, None]).reshape(*place.shape, *(1,) * (values.ndim - 1))
    if values.shape[0] == 0:
        return jnp.full(out.shape, padding_value, out.dtype)
    rows = values[jnp.clip(place, 0, values.shape[0] - 1)]
    return jnp.where(inside, rows, jnp.asarray(padding_value, out.dtype))


@lowers(aten._padded_dense_to_jagged_forward.default)
def padded_to_jagged(out, dense, offsets, total_L=None):
    (offsets,) = offsets
    if out.size == 0:
        return jnp.zeros(out.shape, out.dtype)
    row = jnp.arange(out.shape[0], dtype=offsets.dtype)
    batch = jnp.clip(jnp.searchsorted(offsets, row, side="right") - 1, 0, dense.shape[0] - 1)
    return dense[batch, jnp.clip(row - offsets[batch], 0, dense.shape[1] - 1)]
