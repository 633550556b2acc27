"""Places of nonzero elements, as many as the caller says: the form of ``nonzero`` whose shape is known."""

import jax.numpy as jnp
import torch

from lazytpu.lowering.registry import lowers

aten = torch.ops.aten


@lowers(aten.nonzero_static.default)
def nonzero_static(out, x, *, size, fill_value=-1):
    if 0 in out.shape or x.size == 0:
        return jnp.full(out.shape, fill_value, out.dtype)
    places = jnp.nonzero(x, size=size, fill_value=fill_value)
    return jnp.stack(places, 1).astype(out.dtype)
