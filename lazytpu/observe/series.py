"""Measurements of one kind."""

from __future__ import annotations

import time
from collections import deque

MAX_SAMPLES = 1024


class Series:
    """Measurements: how many, their sum, and the last `MAX_SAMPLES` of them with when they were made."""

    __slots__ = ("count", "samples", "total")

    def __init__(self) -> None:
        self.clear()

    def add(self, value: float) -> None:
        """Adds a measurement."""
        self.count += 1
        self.total += value
        self.samples.append((time.perf_counter(), value))

    def clear(self) -> None:
        """Forgets all."""
        self.count, self.total = 0, 0.0
        self.samples: deque[tuple[float, float]] = deque(maxlen=MAX_SAMPLES)
