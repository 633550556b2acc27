"""What the tests of explanations share: no graph is known, and the next one is graph 1."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import lazytpu
from lazytpu.diagnosis import events
from lazytpu.tracing import step


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(lazytpu.config, "disk_cache", False)
    step.forget()
    lazytpu.metrics.reset()
    monkeypatch.setattr(events, "_total", 0)
    yield
    step.forget()
    lazytpu.metrics.reset()
