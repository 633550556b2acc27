"""A smoothed rate."""

from __future__ import annotations

import time


class RateTracker:
    """Counts items and reports how many are done in a second.

    Args:
        smooth_factor: weight of the older rate, from 0 to 1; by default 0.4.
    """

    def __init__(self, smooth_factor: float | None = None) -> None:
        self._smooth = 0.4 if smooth_factor is None else smooth_factor
        self._start = self._last = time.time()
        self._rate = 0.0
        self._count = self._counted = 0.0

    def add(self, count: float) -> None:
        """Add items that are done."""
        self._count += count

    def rate(self) -> float:
        """Return the items per second, smoothed over the calls of this method."""
        now = time.time()
        if now > self._last and self._count > self._counted:
            fresh = (self._count - self._counted) / (now - self._last)
            self._rate = fresh if not self._counted else self._rate * self._smooth + fresh * (1 - self._smooth)
            self._last, self._counted = now, self._count
        return self._rate

    def global_rate(self) -> float:
        """Return the items per second since the start."""
        now = time.time()
        return self._count / (now - self._start) if now > self._start else 0.0
