"""Random programs of views, writes and cuts, run in lockstep with eager (aliasing_programs.py).

The default is a fixed set of small programs.  Set ``LAZYTPU_TEST_PROGRAMS=5000`` to run
that many new ones (about 30 a second on a free core).
"""

from __future__ import annotations

import os
from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tests.support.aliasing_actions  # noqa: F401  fills ACTIONS
from lazytpu.diagnosis import events
from lazytpu.tracing import step
from tests.support.aliasing_programs import ACTIONS, Program

FORGET_EVERY = 100  # programs: each compiles graphs of its own, and a few thousand of those fill the memory
done = count(1)
MANY = os.environ.get("LAZYTPU_TEST_PROGRAMS")

programs = st.lists(
    st.tuples(st.sampled_from(sorted(ACTIONS)), st.integers(0, 2**32 - 1)), min_size=4, max_size=18 if MANY else 14
)


@pytest.mark.filterwarnings("ignore:.*:UserWarning")  # torch warns of writes to expanded tensors and resized outputs
@settings(
    max_examples=int(MANY or 60),
    deadline=None,
    derandomize=not MANY,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(programs)
def test_programs_agree_with_eager(steps: list[tuple[str, int]]) -> None:
    Program().run(steps)
    if next(done) % FORGET_EVERY == 0:
        step.forget()
        events.compilations.clear()
