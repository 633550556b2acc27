"""Counters, timers and steps: what happened, how often and for how long."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from lazytpu.observe import metrics_tables
from lazytpu.observe.metrics_tables import Step
from lazytpu.observe.series import Series

MAX_STEPS = 1000

_counters: Counter[str] = Counter()
_timers: dict[str, Series] = {}
_sizes: dict[str, Series] = {}
_fallbacks: Counter[str] = Counter()
_steps: deque[Step] = deque(maxlen=MAX_STEPS)

# Counters kept elsewhere because their owner updates them in the hot path: name -> how to read it.
_sources: dict[str, Callable[[], int]] = {}
_source_base: dict[str, int] = {}
_forgetters: list[Callable[[], None]] = []


def count(name: str, amount: int = 1) -> None:
    """Adds to a counter."""
    _counters[name] += amount


def count_hit() -> None:
    """Notes that a graph was found and started."""
    _counters["cache_hit"] += 1
    _counters["execute"] += 1


def count_fallback(op: str) -> None:
    """Notes that ``op`` ran on the CPU for want of a lowering."""
    _fallbacks[op] += 1
    _counters["fallback"] += 1


def add_source(name: str, read: Callable[[], int]) -> None:
    """Makes ``counter(name)`` report ``read()``, from the last `reset` on."""
    _sources[name] = read
    _source_base[name] = 0


def timer(name: str) -> Series:
    """The timer of that name, which stays the same object for good."""
    found = _timers.get(name)
    if found is None:
        found = _timers[name] = Series()
    return found


def all_timers() -> dict[str, Series]:
    """Return every timer by name."""
    return dict(_timers)


def all_sizes() -> dict[str, Series]:
    """Return the sizes in bytes of every kind of transfer by name."""
    return dict(_sizes)


def sizes(name: str) -> Series | None:
    """The sizes in bytes of the transfers of a name, None where there were none."""
    return _sizes.get(name)


def add_time(name: str, seconds: float) -> None:
    """Adds one measurement to a timer."""
    timer(name).add(seconds)


def add_transfer(name: str, seconds: float, size: int) -> None:
    """Adds a transfer to the counters ``name`` and ``<name>_bytes`` and to the timer ``name``.

    Args:
        size: in bytes.
    """
    _counters[name] += 1
    _counters[f"{name}_bytes"] += size
    timer(name).add(seconds)
    known = _sizes.get(name)
    if known is None:
        known = _sizes[name] = Series()
    known.add(size)


def add_step(step: Step) -> None:
    """Keeps what a step cost; the last `MAX_STEPS` are kept."""
    _steps.append(step)


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
    reason), ``op`` (ops recorded), ``execute``, ``transfer_in``, ``transfer_out``, ``transfer_in_bytes``,
    ``transfer_out_bytes``, ``donated`` (buffers given up to the results of a graph), ``fallback`` and
    ``cut: <reason>``; 0 for a name never counted.
    """
    if name in _sources:
        return _sources[name]() - _source_base[name]
    return _counters[name]


def plain_counters(names: Iterable[str]) -> list[int]:
    """Counters that are kept here, since the last `reset`."""
    return [_counters.get(name, 0) for name in names]


def counters() -> dict[str, int]:
    """All counters that are not zero."""
    names = sorted({*_counters, *_sources})
    return {name: counter(name) for name in names if counter(name)}


def timers() -> dict[str, tuple[int, float]]:
    """Name to (how many measurements, their sum in seconds).

    ``lower`` (to StableHLO), ``compile`` (XLA), ``cut`` (ending a graph, without these), ``dispatch`` (starting a
    compiled graph), ``wait`` (for the device), ``transfer_in``, ``transfer_out``, and ``run`` (the device at work; only
    with ``lazytpu.config.metrics``, see the reference of metrics).
    """
    return {name: (series.count, series.total) for name, series in sorted(_timers.items()) if series.count}


def fallbacks() -> dict[str, int]:
    """Ops that ran on the CPU because they have no lowering, with how often."""
    return dict(_fallbacks)


def steps() -> list[dict[str, Any]]:
    """What each of the last steps cost, the oldest first: the fields of `lazytpu.observe.metrics_tables.Step`.

    A step ends with `lazytpu.mark_step`, or with a call of a function that `lazytpu.compile` replays.  The last
    1,000 steps since `reset` are kept.

    Example:
        >>> lazytpu.metrics.steps()[-1]["compiles"]  # doctest: +SKIP
        0
    """
    return [step._asdict() for step in list(_steps)]


def on_reset(forget: Callable[[], None]) -> None:
    """Makes `reset` call ``forget`` too."""
    _forgetters.append(forget)


def reset() -> None:
    """Sets every counter and timer to zero and forgets the steps and what `lazytpu.explain` tells."""
    _counters.clear()
    for series in (*_timers.values(), *_sizes.values()):
        series.clear()
    _fallbacks.clear()
    _steps.clear()
    for name, read in _sources.items():
        _source_base[name] = read()
    for forget in _forgetters:
        forget()


def report() -> str:
    """What the steps cost, counters, timers and fallbacks, as tables for people."""
    return metrics_tables.text_of(metrics_tables.tables(list(_steps), counters(), timers(), fallbacks()))
