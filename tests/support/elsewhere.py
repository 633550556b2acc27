"""Tests that run in other processes; each waits in the process of the suite for what became of it there."""

from __future__ import annotations

import functools
import json
import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

Test = Callable[[], None]
_ROOT = Path(__file__).parents[2]
found: dict[str, dict[str, Test]] = {}
"""In the other process: the tests of each group, by file and name."""


def marked(test: Test, group: str, is_there: bool, failure_of: Callable[[Path, str], str]) -> Test:
    """Note a test in the process that runs it; elsewhere return one that waits for it.

    Args:
        is_there: whether this is the process that runs it.
        failure_of: takes the test's file and its name there; returns why it failed, empty for success.
    """
    file = Path(test.__code__.co_filename)
    name = f"{file.name}::{test.__name__}"
    if is_there:
        found.setdefault(group, {})[name] = test
        return test

    @functools.wraps(test)
    def wait() -> None:
        failure = failure_of(file, name)
        if failure:
            pytest.fail(failure, pytrace=False)

    return wait


def outcomes(place: Path, group: str, mark: str, run: Callable[[list[str], Path], None]) -> dict[str, str]:
    """Return how each test of a group ended, of a file or of all in a folder.

    Args:
        mark: what a file of the folder contains that has such tests.
        run: runs the tests of these modules and writes how they ended into a file; called once in a run of the suite.
    """
    suite = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    kept = Path(tempfile.gettempdir()) / f"lazytpu-{suite}-{place.name}-{group}.json"
    files = [place] if place.is_file() else sorted(f for f in place.glob("test_*.py") if mark in f.read_text())
    with FileLock(f"{kept}.lock"):
        if not kept.exists():
            run([".".join(file.relative_to(_ROOT).with_suffix("").parts) for file in files], kept)
    return json.loads(kept.read_text())


def outcome_of(test: Test) -> str:
    """Run a test, in the other process; return what it raised, empty for success."""
    import lazytpu

    lazytpu.metrics.reset()
    try:
        test()
        lazytpu.wait()
    except BaseException:
        return traceback.format_exc()
    return ""
