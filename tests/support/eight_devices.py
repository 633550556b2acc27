"""Tests that run in a process with eight virtual devices.

A test file marks its functions with `eight_devices`; in the process of the suite, which has one device, each of them
waits for what became of it in another process, one for all such functions of the folder::

    @eight_devices
    def test_a_sum_over_devices(): ...
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import sys
from pathlib import Path

from tests.support import elsewhere, xla_flags
from tests.support.elsewhere import Test
from tests.support.processes import run_code

_HERE = "LAZYTPU_TEST_DEVICES"


def eight_devices(test: Test) -> Test:
    """Run a test in a process with eight devices."""
    return _marked(test, "")


def eight_devices_alone(test: Test) -> Test:
    """Run a test in a process with eight devices of its own: one that is slow, and so is not always run."""
    return _marked(test, test.__name__)


def _marked(test: Test, group: str) -> Test:
    def failure_of(file: Path, name: str) -> str:
        failure = _results(file if group else file.parent, group)[name]
        return failure and f"on eight devices:\n{failure}"

    return elsewhere.marked(test, group, _HERE in os.environ, failure_of)


@functools.cache
def _results(place: Path, group: str) -> dict[str, str]:
    """Return how each test of a group ended, of a file or of all in a folder: what was raised, empty for success."""

    def run_all(modules: list[str], kept: Path) -> None:
        code = f"from tests.support import eight_devices as e; e.run({modules!r}, {group!r}, {str(kept)!r})"
        settings = {
            "XLA_FLAGS": xla_flags.devices(8),
            "LAZYTPU_DISK_CACHE": "0",
            "LAZYTPU_COMPILE_AFTER": "1",
            _HERE: "8",
        }
        done = run_code(code, **settings)
        assert kept.exists(), done.stderr

    return elsewhere.outcomes(place, group, "import eight_devices", run_all)


def run(modules: list[str], group: str, into: str) -> None:
    """Run the tests of a group, in the process that has the devices, and write how they ended."""
    sys.path.insert(0, os.getcwd())
    for module in modules:
        importlib.import_module(module)
    results = {name: elsewhere.outcome_of(test) for name, test in elsewhere.found[group].items()}
    Path(f"{into}.part").write_text(json.dumps(results))
    os.replace(f"{into}.part", into)
