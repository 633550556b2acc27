"""The processes that a program runs on: each rank has one device, and its part of what is exchanged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lazytpu.ir.rank_patterns import Ranks, groups_of

AXIS = "rank"
"""Name of the axis that the processes of a program lie on."""

_over: list[Ranks] = []


@contextmanager
def over(ranks: Ranks) -> Iterator[None]:
    """Let rules called inside know the processes of their program."""
    _over.append(ranks)
    try:
        yield
    finally:
        _over.pop()


def axis_groups(pattern: str) -> list[list[int]] | None:
    """Return the groups of a pattern as positions on the axis; None where there is one, of all in order."""
    ranks = _over[-1]
    places = {rank: i for i, rank in enumerate(ranks)}
    found = [[places[r] for r in group] for group in groups_of(pattern) if group[0] in places]
    return None if found == [list(range(len(ranks)))] else found


def size_of(pattern: str) -> int:
    """Return how many processes a group of a pattern has."""
    return len(groups_of(pattern)[0])


def index_in_group(pattern: str) -> jax.Array:
    """Return the place of the running process in its group."""
    groups = axis_groups(pattern)
    here = lax.axis_index(AXIS)
    if groups is None:
        return here
    places = np.zeros(len(_over[-1]), np.int32)
    for group in groups:
        places[group] = range(len(group))
    return jnp.asarray(places)[here]


def pairs(pattern: str, moves: Sequence[int]) -> list[tuple[int, int]]:
    """Return (from, to) on the axis, for each group, of moves between places of a group: from, to, from, to, ..."""
    ranks = _over[-1]
    groups = axis_groups(pattern) or [list(range(len(ranks)))]
    return [(group[a], group[b]) for group in groups for a, b in zip(moves[::2], moves[1::2], strict=True)]
