"""`explain`: every compilation, forced cut, promoted number and fallback, with its cause and line."""

from __future__ import annotations

from collections.abc import Mapping

from lazytpu.diagnosis import events
from lazytpu.diagnosis.events import Tally


def explain() -> str:
    """Why each graph was compiled, what forced each cut, and what ran on the CPU, since the last reset.

    Returns:
        Text for people; ``nothing was compiled`` when there is nothing to say.

    Example:
        >>> print(lazytpu.explain())  # doctest: +SKIP
        compiled 2 graphs
          1  57 ops, 0.61 s: the first graph
             at   train.py:20  CNN.c1
    """
    lines = _compilations() + _promotions() + _unreplayed() + _cuts() + _reads() + _fallbacks()
    return "\n".join(lines) or "nothing was compiled"


def _compilations() -> list[str]:
    if not events.compilations:
        return []
    n = len(events.compilations)
    loaded = sum(event.loaded for event in events.compilations)
    earlier = f", {loaded} of them in an earlier process" if loaded else ""
    lines = [f"compiled {n} graph{'s' if n > 1 else ''}{earlier}"]
    for event in events.compilations:
        lines += [f"  {line}" for line in events.lines_of(event)]
    return lines


def _promotions() -> list[str]:
    rows = [f"  {op} {argument} at {line}" for (op, argument, line) in events.promotions]
    return ["scalars made dynamic because they changed", *rows] if rows else []


def _unreplayed() -> list[str]:
    rows = [f"  {function}: {problem}" for function, problem in events.unreplayed]
    lines = ["compiled functions that are recorded in every call", *rows] if rows else []
    rows = [f"  {n} x {function}: {change}" for (function, change), n in events.rerecorded.most_common()]
    return lines + (["compiled functions that were recorded again", *rows] if rows else [])


def _cuts() -> list[str]:
    rows = _rows(events.cuts, "waited {} ms for the device")
    return ["cuts forced in the middle of a step", *rows] if rows else []


def _reads() -> list[str]:
    rows = _rows(events.reads, "waited {} ms for the device")
    return ["reads that waited for a running step", *rows] if rows else []


def _fallbacks() -> list[str]:
    rows = _rows(events.fallbacks, "on the CPU for {} ms")
    return ["ops without a lowering, which ran on the CPU", *rows] if rows else []


def _rows(tallies: Mapping[tuple[str, str], Tally], took: str) -> list[str]:
    """``3 x item at train.py:12, waited 4.2 ms for the device``, the longest first."""
    ordered = sorted(tallies.items(), key=lambda entry: -entry[1].seconds)
    return [f"  {t.count} x {what} at {line}, {took.format(f'{1e3 * t.seconds:.1f}')}" for (what, line), t in ordered]
