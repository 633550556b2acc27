"""Count and time what happens, and keep what each step cost."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from lazytpu.observe import metrics_tables
from lazytpu.observe.metrics_tables import Step
from lazytpu.observers import calls_of, notify

MAX_SAMPLES = 1024
MAX_STEPS = 1000


class Series:
    """Measurements of one kind: their number, their sum, and the last `MAX_SAMPLES` of them with their times."""

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


_counters: Counter[str] = Counter()
_timers: dict[str, Series] = {}
_sizes: dict[str, Series] = {}
_fallbacks: Counter[str] = Counter()
_steps: deque[Step] = deque(maxlen=MAX_STEPS)

# Values at the last `reset` of the counters that observers keep.
_base: dict[str, int] = {}


def count(name: str, amount: int = 1) -> None:
    """Add to a counter."""
    _counters[name] += amount


def count_hit() -> None:
    """Count a graph that was found and started."""
    _counters["cache_hit"] += 1
    _counters["execute"] += 1


def count_fallback(op: str) -> None:
    """Count an op that ran on the CPU because it has no lowering."""
    _fallbacks[op] += 1
    _counters["fallback"] += 1


def timer(name: str) -> Series:
    """Return the timer of that name, always the same object."""
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


def add_time(name: str, seconds: float) -> None:
    """Add one measurement to a timer."""
    timer(name).add(seconds)


def add_transfer(name: str, seconds: float, size: int) -> None:
    """Add a transfer to the counters ``name`` and ``<name>_bytes`` and to the timer ``name``.

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
    """Keep what a step cost; the last `MAX_STEPS` are kept."""
    _steps.append(step)


@contextmanager
def timed(name: str) -> Iterator[None]:
    """Add the time spent inside to a timer."""
    start = time.perf_counter()
    try:
        yield
    finally:
        add_time(name, time.perf_counter() - start)


def counter(name: str) -> int:
    """Return how often something happened since the last `reset`.

    ``compile``, ``cache_hit``, ``step`` (calls of ``mark_step``), ``cut`` (graphs cut, for any reason), ``op`` (ops
    recorded), ``execute``, ``transfer_in``, ``transfer_out``, ``transfer_in_bytes``, ``transfer_out_bytes``,
    ``donated`` (buffers donated to the results of a graph), ``fallback`` and ``cut: <reason>``; 0 for a name never
    counted.
    """
    elsewhere = _kept_elsewhere()
    return elsewhere[name] - _base.get(name, 0) if name in elsewhere else _counters[name]


def _kept_elsewhere() -> dict[str, int]:
    """Return the counters that observers keep, counted from the start of the process."""
    return {name: value for read in calls_of("counters") for name, value in read().items()}


def plain_counters(names: Iterable[str]) -> list[int]:
    """Return counters that are kept here, since the last `reset`."""
    return [_counters.get(name, 0) for name in names]


def counters() -> dict[str, int]:
    """Return all counters that are not zero."""
    names = sorted({*_counters, *_kept_elsewhere()})
    return {name: counter(name) for name in names if counter(name)}


def timers() -> dict[str, tuple[int, float]]:
    """Return (the number of measurements, their sum in seconds) by name.

    ``lower`` (to StableHLO), ``compile`` (XLA), ``cut`` (ending a graph, without these), ``dispatch`` (starting a
    compiled graph), ``wait`` (for the device), ``transfer_in``, ``transfer_out``, and ``run`` (the device at work; only
    with ``lazytpu.config.metrics``, see the reference of metrics).
    """
    return {name: (series.count, series.total) for name, series in sorted(_timers.items()) if series.count}


def fallbacks() -> dict[str, int]:
    """Return how often each op without a lowering ran on the CPU."""
    return dict(_fallbacks)


def steps() -> list[dict[str, float | None]]:
    """Return what each of the last steps cost, the oldest first: the fields of `lazytpu.observe.metrics_tables.Step`.

    A step ends with `lazytpu.mark_step`, or with a call of a function that `lazytpu.compile` replays.  The last
    1,000 steps since `reset` are kept.

    Example:
        >>> lazytpu.metrics.steps()[-1]["compiles"]  # doctest: +SKIP
        0
    """
    return [step._asdict() for step in last_steps()]


def last_steps() -> list[Step]:
    """Return what each of the last steps cost, the oldest first."""
    return list(_steps)


def reset() -> None:
    """Reset every counter and timer, and forget the steps and what `lazytpu.explain` shows."""
    _counters.clear()
    for series in (*_timers.values(), *_sizes.values()):
        series.clear()
    _fallbacks.clear()
    _steps.clear()
    _base.update(_kept_elsewhere())
    notify("metrics_reset")


def report() -> str:
    """Return tables of the costs of steps, counters, timers and fallbacks, as text."""
    return metrics_tables.text_of(metrics_tables.tables(list(_steps), counters(), timers(), fallbacks()))
