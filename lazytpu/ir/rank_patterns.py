"""Which processes exchange what: the pattern of ranks of a collective.  No jax here, as in all of this folder.

A group of processes has another name in each of them, and often other members.  What stands in a graph is the pattern:
``0-1 of 4`` are the groups (0, 1) and (2, 3), ``0-2:2 of 4`` are (0, 2) and (1, 3).  So equal steps of all processes
have equal graphs.  A group that shifted copies of itself cannot complete to the world stands for itself: ``=0,1,3``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

Ranks = tuple[int, ...]

COLLECTIVES = frozenset(
    f"lazytpu.{name}"
    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "scatter", "permute")
)
"""Names of the ops that exchange data between processes; their last argument is a pattern."""


def pattern_of(ranks: Sequence[int], world: int) -> str:
    """Return the pattern of a group.

    Args:
        ranks: of the members in the whole world, in the order of the group.
        world: how many processes there are.

    Example:
        >>> pattern_of([2, 3], 4), pattern_of([1, 3], 4), pattern_of([0, 1, 3], 4)
        ('0-1 of 4', '0-2:2 of 4', '=0,1,3')
    """
    first = min(ranks)
    offsets = tuple([r - first for r in ranks])
    tiles = _tiles(offsets, world)
    if tiles is None or tuple(ranks) not in tiles:
        return f"={','.join(map(str, ranks))}"
    return f"{_ranges(offsets)} of {world}"


@cache
def groups_of(pattern: str) -> tuple[Ranks, ...]:
    """Return the groups of a pattern."""
    if is_alone(pattern):
        return (tuple(map(int, pattern[1:].split(","))),)
    offsets, _, world = pattern.partition(" of ")
    tiles = _tiles(_parsed(offsets), int(world))
    assert tiles is not None
    return tiles


def is_alone(pattern: str) -> bool:
    """Return whether a pattern says nothing about the processes outside of its group."""
    return pattern.startswith("=")


def connected(patterns: Iterable[str], rank: int) -> Ranks:
    """Return the processes that exchange data with one, directly or through others, in order."""
    found, waiting = {rank}, [rank]
    groups = [group for pattern in patterns for group in groups_of(pattern)]
    while waiting:
        at = waiting.pop()
        new = {r for group in groups if at in group for r in group} - found
        found |= new
        waiting += new
    return tuple(sorted(found))


def _tiles(offsets: Ranks, world: int) -> tuple[Ranks, ...] | None:
    """Return the shifted copies of a group that together are the whole world, None where there are none."""
    free = [True] * world
    found = []
    for first in range(world):
        if not free[first]:
            continue
        group = tuple([first + n for n in offsets])
        if max(group) >= world or not all(free[r] for r in group):
            return None
        for r in group:
            free[r] = False
        found.append(group)
    return tuple(found)


def _ranges(numbers: Ranks) -> str:
    """Return ``0-3``, ``0-6:2`` or, of several runs, ``0-1,4-5``."""
    runs: list[list[int]] = []
    for n in numbers:
        run = runs[-1] if runs else []
        if len(run) == 1 and n > run[0] or len(run) > 1 and n - run[-1] == _step(run):
            run.append(n)
        else:
            runs.append([n])
    return ",".join(map(_range, runs))


def _step(run: list[int]) -> int:
    return run[1] - run[0]


def _range(run: list[int]) -> str:
    if len(run) == 1:
        return str(run[0])
    return f"{run[0]}-{run[-1]}" + (f":{_step(run)}" if _step(run) != 1 else "")


def _parsed(text: str) -> Ranks:
    found: list[int] = []
    for run in text.split(","):
        ends, _, step = run.partition(":")
        first, _, last = ends.partition("-")
        found += range(int(first), int(last or first) + 1, int(step or 1))
    return tuple(found)
