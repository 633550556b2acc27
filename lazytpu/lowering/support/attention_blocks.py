"""Attention some rows at a time, on CPUs and for long sequences: scores of all rows would not stay in the cache.

The rows of a query do not depend on each other.  A loop takes as many of them as have `SCORE_BYTES` of scores; where
attention is causal, the rows are cut into `SPANS` first, and those of a span look at the keys up to its end only, which
saves nearly half of the products.  benchmarks/attention_blocks.py measures both and has the figures.
"""

import jax.numpy as jnp
from jax import lax

from lazytpu.lowering.registry import forced, target_platform

SCORE_BYTES = 4 << 20  # of one iteration of the loop
WHOLE_BYTES = 16 << 20  # scores of fewer are computed at once
SPANS = 8
_FEWEST_ROWS = 64
_SALT = 0x9E3779B97F4A7C15


def rows_at_a_time(q, k):
    """Return how many rows of ``q`` [..., queries, width] one iteration takes; 0 where all are taken at once."""
    how = forced("whole_attention", "blocked_attention")
    bytes_of_row = 4 * q.size // max(1, q.shape[-1] * q.shape[-2]) * k.shape[-2]
    if how == "whole_attention" or (
        not how and (target_platform() != "cpu" or bytes_of_row * q.shape[-2] < WHOLE_BYTES)
    ):
        return 0
    rows = max(_FEWEST_ROWS, SCORE_BYTES // max(1, bytes_of_row) // _FEWEST_ROWS * _FEWEST_ROWS)
    return rows if rows < q.shape[-2] else 0


def spans(queries, keys, rows, is_causal):
    """Return (first row, row behind the last, keys that they look at) of each span."""
    if not is_causal:
        return [(0, queries, keys)]
    length = rows * max(1, -(-queries // (rows * SPANS)))
    ends = [min(start + length, queries) for start in range(0, queries, length)]
    return [(start, end, min(end, keys)) for start, end in zip(range(0, queries, length), ends, strict=True)]


def some_rows(x, first, count):
    """Return rows of [..., rows, width]; all of an array with one row for all."""
    return x if x is None or x.shape[-2] == 1 else lax.dynamic_slice_in_dim(x, first, count, x.ndim - 2)


def key_of(rng, first):
    """Return the random key of the rows from ``first`` on."""
    if rng is None:
        return None
    salt = (jnp.asarray(first).astype(jnp.uint64) + jnp.uint64(1)) * jnp.uint64(_SALT)
    return rng.at[0].set(rng[0] ^ salt)


def iterations(span, rows):
    """Return how many whole iterations a span takes, and the first row and the count of the rest."""
    start, end, _ = span
    count = (end - start) // rows
    return count, start + count * rows, end - start - count * rows


def joined(parts):
    """Return [iteration, ..., rows, width] as [..., iterations * rows, width]."""
    parts = jnp.moveaxis(parts, 0, -3)
    return parts.reshape(*parts.shape[:-3], -1, parts.shape[-1])
