"""What every test shares: the device, and no graph left over from the test before."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from tests.support import xla_flags
from tests.support.lists import listed
from tests.support.logged import Logged

os.environ["LAZYTPU_DISK_CACHE"] = "0"  # tests compile, whatever the user's cache holds; read at import
os.environ.setdefault("LAZYTPU_COMPILE_AFTER", "1")  # and at once; tests/runtime/test_tiers.py is about the default
# Most of the suite's time was the compiler's; what is about numerics compiles as users do (`optimized`).
os.environ.setdefault("XLA_FLAGS", xla_flags.QUICK)

for _absent in (torch.cuda, torch.xpu, torch.mtia):
    # `torch.manual_seed` notes each seed for them, with the text of its stack, which took milliseconds
    _absent.manual_seed_all = lambda seed: None

import lazytpu
import lazytpu.errors
from lazytpu.ir.tree import trace
from lazytpu.runtime import compiler, index_checks
from lazytpu.tracing import step


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that slow.txt lists as slow, and skip those that newer.txt lists for a newer torch or jax."""
    here = Path(__file__).parent
    slow = {line for line, *_ in listed("slow.txt")}
    newer = {name: rest for name, *rest in listed("newer.txt")}
    there = {package: _release(version(package)) for package, *_ in newer.values()}
    for item in items:
        name = f"{item.path.relative_to(here)}::{item.nodeid.partition('::')[2]}"
        without_parameters = name.partition("[")[0]
        if name in slow or without_parameters in slow:
            item.add_marker(pytest.mark.slow)
        if found := newer.get(name) or newer.get(without_parameters):
            package, first, what = found
            if there[package] < _release(first):
                item.add_marker(pytest.mark.skip(reason=f"before {package} {first}: {what}"))


def _release(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.partition("+")[0].split(".")[:2] if part.isdigit())


def pytest_collection_finish() -> None:
    """Take what is loaded out of the collector's sight: a collection of all objects took half a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def device() -> torch.device:
    """The lazy device."""
    return lazytpu.device()


@pytest.fixture
def caplog() -> Iterator[Logged]:
    """What is logged."""
    handler, root = Logged(), logging.getLogger()
    root.addHandler(handler)
    yield handler
    root.removeHandler(handler)


@pytest.fixture(autouse=True)
def nothing_pending() -> Iterator[None]:
    """Ends each test with a cut, so that no test pays for, or hides behind, the graph of another."""
    yield
    try:
        lazytpu.wait()
    except lazytpu.errors.LazyTPUError:  # a graph that failed, held by garbage of the test's own traceback
        gc.collect()
        try:
            lazytpu.wait()
        finally:  # if it fails again, it fails this test, and is dropped so that it fails no other
            trace.pending.clear()
            trace.next_step()


@pytest.fixture
def optimized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile as users do."""
    options_for = compiler.options_for
    monkeypatch.setattr(compiler, "options_for", lambda graph: {**options_for(graph), **xla_flags.AS_USERS})


@pytest.fixture
def checks() -> Iterator[None]:
    """The check of positions is on; what a test leaves unread is no other test's."""
    step.forget()  # ops that another test recorded alike would carry its lines
    lazytpu.config.check_bounds = True
    yield
    lazytpu.config.check_bounds = False
    index_checks._reports.clear()


@pytest.fixture
def uncounted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is counted and no graph is known."""
    monkeypatch.setattr(lazytpu.config, "disk_cache", False)
    step.forget()
    lazytpu.metrics.reset()
    yield
    lazytpu.metrics.reset()


@pytest.fixture
def fresh_dynamo() -> None:
    """Dynamo knows no function, and nothing has been counted."""
    torch._dynamo.reset()
    lazytpu.metrics.reset()
