"""Ranks whose graphs differ find out which of their collectives they can run together."""

from __future__ import annotations

import pytest

from lazytpu.errors import WorldError
from lazytpu.runtime.agreement import in_common

ALL, FIRST, LAST = ("sum over all", "0,1,2"), ("sum of the first", "0,1"), ("copy of the last", "1,2")


def told(*lists: list[tuple[str, str]]) -> dict[int, dict[str, list[str]]]:
    return {
        rank: {
            "collectives": [text for text, _ in given],
            "with": [ranks for _, ranks in given],
            "lines": [f"train.py:{i}" for i, _ in enumerate(given, 1)],
        }
        for rank, given in enumerate(lists)
    }


def test_all_run_what_they_have_up_to_where_the_first_graph_ends() -> None:
    assert in_common(told([ALL, ALL], [ALL], [ALL, ALL])) == {0: 1, 1: 1, 2: 1}
    assert in_common(told([], [ALL], [ALL])) == {0: 0, 1: 0, 2: 0}


def test_groups_of_some_ranks_are_none_of_the_others_concern() -> None:
    assert in_common(told([FIRST, ALL], [FIRST, LAST, ALL], [LAST, ALL])) == {0: 2, 1: 3, 2: 2}
    assert in_common(told([FIRST, ALL], [FIRST, LAST, ALL], [])) == {0: 1, 1: 1, 2: 0}


def test_members_that_come_with_different_collectives_raise() -> None:
    with pytest.raises(
        WorldError, match=r"rank 0: sum of the first, train.py:1\n *ranks 1 and 2: sum over all, train.py:1"
    ):
        in_common(told([FIRST, ALL], [ALL, FIRST], [ALL]))
    with pytest.raises(
        WorldError, match=r"ranks 0 and 1: sum over all, train.py:2\n *rank 2: copy of the last, train.py:2"
    ):
        in_common(told([ALL, ALL], [ALL, ALL], [ALL, LAST]))


def test_what_waits_for_a_rank_that_is_not_there_yet_does_not_raise() -> None:
    assert in_common(told([ALL], [ALL, ALL], [ALL, LAST])) == {0: 1, 1: 1, 2: 1}
