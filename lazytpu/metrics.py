"""Counters and timers: what happened, how often and for how long."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_counters: Counter[str] = Counter()
_timers: dict[str, list[float]] = {}
_fallbacks: Counter[str] = Counter()

# Counters kept elsewhere because their owner updates them in the hot path: name -> how to read it.
_sources: dict[str, Callable[[], int]] = {}
_source_base: dict[str, int] = {}
_forgetters: list[Callable[[], None]] = []


def count(name: str, amount: int = 1) -> None:
    """Adds to a counter."""
    _counters[name] += amount


def count_fallback(op: str) -> None:
    """Notes that ``op`` ran on the CPU for want of a lowering."""
    _fallbacks[op] += 1


def add_source(name: str, read: Callable[[], int]) -> None:
    """Makes ``counter(name)`` report ``read()``, from the last `reset` on."""
    _sources[name] = read
    _source_base[name] = 0


def add_time(name: str, seconds: float) -> None:
    """Adds one measurement to a timer."""
    timer = _timers.setdefault(name, [0, 0.0])
    timer[0] += 1
    timer[1] += seconds


@contextmanager
def timed(name: str) -> Iterator[None]:
    """Adds the time spent inside to a timer."""
    start = time.perf_counter()
    try:
        yield
    finally:
        add_time(name, time.perf_counter() - start)


def counter(name: str) -> int:
    """How often something happened since the last `reset`.

    ``compile``, ``cache_hit``, ``step`` (calls of ``mark_step``), ``cut`` (graphs cut, for whatever
    reason), ``op`` (ops recorded), ``execute``, ``transfer_in``, ``transfer_out``; 0 for a name never counted.
    """
    if name in _sources:
        return _sources[name]() - _source_base[name]
    return _counters[name]


def counters() -> dict[str, int]:
    """All counters that are not zero."""
    names = sorted({*_counters, *_sources})
    return {name: counter(name) for name in names if counter(name)}


def timers() -> dict[str, tuple[int, float]]:
    """Name to (how many measurements, their sum in seconds)."""
    return {name: (int(n), total) for name, (n, total) in sorted(_timers.items())}


def fallbacks() -> dict[str, int]:
    """Ops that ran on the CPU because they have no lowering, with how often."""
    return dict(_fallbacks)


def on_reset(forget: Callable[[], None]) -> None:
    """Makes `reset` call ``forget`` too."""
    _forgetters.append(forget)


def reset() -> None:
    """Sets every counter and timer to zero and forgets what `lazytpu.explain` tells."""
    _counters.clear()
    _timers.clear()
    _fallbacks.clear()
    for name, read in _sources.items():
        _source_base[name] = read()
    for forget in _forgetters:
        forget()


def report() -> str:
    """Counters, timers and fallbacks as a table for people."""
    rows = [("counter", "count", "")] + [(name, str(n), "") for name, n in counters().items()]
    rows += [("timer", "count", "seconds")] + [(name, str(n), f"{t:.3f}") for name, (n, t) in timers().items()]
    if _fallbacks:
        rows += [("fallback to the CPU", "count", "")] + [(name, str(n), "") for name, n in _fallbacks.items()]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join(f"{a:<{widths[0]}}  {b:>{widths[1]}}  {c:>{widths[2]}}".rstrip() for a, b, c in rows)
