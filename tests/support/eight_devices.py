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
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

from tests.support.processes import run_code

Test = Callable[[], None]
_ROOT = Path(__file__).parents[2]
_MARK = "import eight_devices"
_HERE = "LAZYTPU_TEST_DEVICES"
_FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
_found: dict[str, dict[str, Test]] = {}  # by group: by file and name


def eight_devices(test: Test) -> Test:
    """Run a test in a process with eight devices."""
    return _marked(test, "")


def eight_devices_alone(test: Test) -> Test:
    """Run a test in a process with eight devices of its own: one that is slow, and so is not always run."""
    return _marked(test, test.__name__)


def _marked(test: Test, group: str) -> Test:
    file = Path(test.__code__.co_filename)
    name = f"{file.name}::{test.__name__}"
    if _HERE in os.environ:
        _found.setdefault(group, {})[name] = test
        return test

    @functools.wraps(test)
    def wait() -> None:
        failure = _results(file if group else file.parent, group)[name]
        if failure:
            pytest.fail(f"on eight devices:\n{failure}", pytrace=False)

    return wait


@functools.cache
def _results(place: Path, group: str) -> dict[str, str]:
    """Return how each test of a group ended, of a file or of all in a folder: what was raised, empty for success."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    kept = Path(tempfile.gettempdir()) / f"lazytpu-{run}-{place.name}-{group}.json"
    files = [place] if place.is_file() else sorted(f for f in place.glob("test_*.py") if _MARK in f.read_text())
    with FileLock(f"{kept}.lock"):
        if not kept.exists():
            modules = [".".join(file.relative_to(_ROOT).with_suffix("").parts) for file in files]
            code = f"from tests.support import eight_devices as e; e.run({modules!r}, {group!r}, {str(kept)!r})"
            settings = {"XLA_FLAGS": _FLAGS, "LAZYTPU_DISK_CACHE": "0", "LAZYTPU_COMPILE_AFTER": "1", _HERE: "8"}
            done = run_code(code, **settings)
            assert kept.exists(), done.stderr
    return json.loads(kept.read_text())


def run(modules: list[str], group: str, into: str) -> None:
    """Run the tests of a group, in the process that has the devices, and write how they ended."""
    sys.path.insert(0, os.getcwd())
    for module in modules:
        importlib.import_module(module)
    lazytpu = importlib.import_module("lazytpu")
    results = {}
    for name, test in _found[group].items():
        lazytpu.metrics.reset()
        try:
            test()
            lazytpu.wait()
            results[name] = ""
        except BaseException:
            results[name] = traceback.format_exc()
    Path(f"{into}.part").write_text(json.dumps(results))
    os.replace(f"{into}.part", into)
