"""What tensors are does not depend on a compiler: these tests run as the first step of a user's program does."""

from __future__ import annotations

import pytest

import lazytpu


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpret graphs that are new."""
    monkeypatch.setattr(lazytpu.config, "compile_after", 2)
