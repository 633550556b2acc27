"""Keep the measurements of one kind."""

from __future__ import annotations

import time
from collections import deque

MAX_SAMPLES = 1024


class Series:
    """Measurements: their number, their sum, and the last `MAX_SAMPLES` of them with their times."""

    __slots__ = ("count", "samples", "total")

    def __init__(self) -> None:
        self.clear()

    def add(self, value: float) -> None:
        """Add a measurement."""
        self.count += 1
        self.total += value
        self.samples.append((time.perf_counter(), value))

    def clear(self) -> None:
        """Forget all."""
        self.count, self.total = 0, 0.0
        self.samples: deque[tuple[float, float]] = deque(maxlen=MAX_SAMPLES)
