"""What the tests of the frontends share."""

from __future__ import annotations

import pytest

import lazytpu
from lazytpu.frontends.replay import capture


@pytest.fixture
def replays_from_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count from zero, and concatenate the gradients even of small networks, as is done where there are many."""
    lazytpu.metrics.reset()
    monkeypatch.setattr(capture, "_MANY", 2)
