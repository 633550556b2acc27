"""What every test shares: the device, and no graph left over from the test before."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import lazytpu


@pytest.fixture
def device() -> torch.device:
    """The lazy device."""
    return lazytpu.device()


@pytest.fixture(autouse=True)
def nothing_pending() -> Iterator[None]:
    """Ends each test with a cut, so that no test pays for, or hides behind, the graph of another."""
    yield
    lazytpu.wait()
