"""What all tests of sparse tensors share."""

from __future__ import annotations

import pytest

import lazytpu


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile nothing: what is recorded are ops on dense tensors, whose rules other tests compile."""
    monkeypatch.setattr(lazytpu.config, "compile_after", 1000)
