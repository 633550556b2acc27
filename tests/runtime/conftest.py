"""What the tests of the runtime share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import lazytpu
from lazytpu.config import config
from lazytpu.observe import metrics
from lazytpu.runtime import executables, tiers
from lazytpu.runtime.disk_cache import store
from lazytpu.tracing import step


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A disk cache of this test's own, switched on."""
    place = tmp_path / "cache"
    for name, value in (("disk_cache", True), ("disk_cache_dir", str(place))):
        monkeypatch.setattr(config, name, value)
    monkeypatch.setattr(store, "_logged", set())
    lazytpu.wait()
    step.forget()
    metrics.reset()
    yield place
    step.forget()


@pytest.fixture
def interpreting(device: torch.device) -> Iterator[None]:
    """Graphs that are new are interpreted, as for users, and none has come before."""
    lazytpu.mark_step()
    executables.forget_executables()
    tiers.forget()
    config.compile_after = 2
    metrics.reset()
    yield
    config.compile_after = 1
