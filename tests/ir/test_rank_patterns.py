"""Patterns of ranks: what stands for a group in a graph."""

from __future__ import annotations

import pytest

from lazytpu.ir.rank_patterns import connected, groups_of, is_alone, pattern_of


@pytest.mark.parametrize(
    ("ranks", "world", "pattern", "groups"),
    [
        ([0, 1, 2, 3], 4, "0-3 of 4", ((0, 1, 2, 3),)),
        ([2, 3], 4, "0-1 of 4", ((0, 1), (2, 3))),
        ([1, 3], 4, "0-2:2 of 4", ((0, 2), (1, 3))),
        ([2, 3, 6, 7], 8, "0-1,4-5 of 8", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ([3], 4, "0 of 4", ((0,), (1,), (2,), (3,))),
        ([1, 0], 2, "1,0 of 2", ((1, 0),)),
        ([0, 1, 3], 4, "=0,1,3", ((0, 1, 3),)),
        ([1, 2], 4, "=1,2", ((1, 2),)),
    ],
)
def test_all_members_of_like_groups_write_one_pattern(ranks, world, pattern, groups) -> None:
    assert pattern_of(ranks, world) == pattern
    assert groups_of(pattern) == groups
    assert is_alone(pattern) == (len(groups) == 1 and len(ranks) < world)
    for group in groups:
        assert pattern_of(group, world) == pattern


def test_who_runs_a_program_together() -> None:
    assert connected(["0-1 of 4"], 2) == (2, 3)
    assert connected(["0-1 of 4", "0-2:2 of 4"], 2) == (0, 1, 2, 3)
    assert connected([], 3) == (3,)
