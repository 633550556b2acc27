"""Products of 64-bit integers, which XLA's compiler for TPUs refuses: sums of what is multiplied element by element."""

import jax.numpy as jnp
from jax import lax

from lazytpu.lowering.registry import target_platform


def dot(a, b, dims, dtype):
    """Return ``lax.dot_general(a, b, dims)``, accumulated in ``dtype``.

    Args:
        dims: ``((of a, of b that are summed over), (of a, of b that are batches))``.
    """
    if target_platform() != "tpu" or dtype not in (jnp.int64, jnp.uint64):
        return lax.dot_general(a, b, dims, preferred_element_type=dtype)
    (of_a, of_b), (batch_a, batch_b) = dims
    free_a = [d for d in range(a.ndim) if d not in (*of_a, *batch_a)]
    free_b = [d for d in range(b.ndim) if d not in (*of_b, *batch_b)]
    a, b = (
        x.transpose(*batch, *free, *of)
        for x, batch, free, of in ((a, batch_a, free_a, of_a), (b, batch_b, free_b, of_b))
    )
    ends = a.ndim - len(of_a), b.ndim - len(of_b)
    a = lax.expand_dims(a.astype(dtype), range(ends[0], ends[0] + len(free_b)))
    b = lax.expand_dims(b.astype(dtype), range(len(batch_b), len(batch_b) + len(free_a)))
    return jnp.sum(a * b, axis=tuple(range(-len(of_a), 0)), dtype=dtype)
