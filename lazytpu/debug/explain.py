"""Explain every compilation, forced cut, dynamic scalar and fallback, with its cause and line, and a slow step."""

from __future__ import annotations

from collections.abc import Mapping

from lazytpu.debug import on_mesh
from lazytpu.debug.slow import account
from lazytpu.diagnosis import events
from lazytpu.diagnosis.events import Tally

_BREAK = "\n        "  # between the ranks of what they recorded differently


def explain() -> str:
    """Why each graph was compiled, what forced each cut, and what ran on the CPU, since the last reset.

    Of programs over a mesh it lists the collectives of one run by kind, axis and bytes, with the line and the reason;
    *nobody asked for* are those that move an intermediate result which nobody has marked.

    After eight steps it ends with where the time of a steady step goes, the costliest lines, and what could be saved,
    each with its line and fix; for that it waits until the device is done with what was started.

    Returns:
        Text for people; ``nothing was compiled`` when there is nothing to say.

    Example:
        >>> print(lazytpu.explain())  # doctest: +SKIP
        compiled 2 graphs
          1  57 ops, 0.61 s: the first graph
             at   train.py:20  CNN.c1
    """
    waited = "waited {} ms for the device"
    sections = {
        _compiled(): [f"  {line}" for event in events.compilations for line in events.lines_of(event)],
        "graphs that ran op by op, without a program, as they were new (lazytpu.config.compile_after)": [
            f"  {n} x {why}, at {line}" for (why, line), n in events.interpretations.most_common()
        ],
        "what the devices of a mesh send in a run of a program": list(on_mesh.explained()),
        "graphs that ran in pieces, as ranks recorded different ops between their collectives": [
            f"  {n} x {' | '.join(where.split(_BREAK))}" for where, n in events.pieces.most_common()
        ],
        "scalars made dynamic because they changed": [f"  {o} {a} at {line}" for o, a, line in events.dynamic_scalars],
        "compiled functions that are recorded in every call": [f"  {f}: {why}" for f, why in events.unreplayed],
        "compiled functions that were recorded again": [
            f"  {n} x {function}: {change}" for (function, change), n in events.rerecorded.most_common()
        ],
        "cuts forced in the middle of a step": _rows(events.cuts, waited),
        "reads that waited for a running step": _rows(events.reads, waited),
        "ops without a lowering, which ran on the CPU": _rows(events.fallbacks, "on the CPU for {} ms"),
    }
    lines = [line for title, rows in sections.items() if rows for line in (title, *rows)]
    return "\n".join([*lines, *account.text()]) or "nothing was compiled"


def _compiled() -> str:
    n = len(events.compilations)
    loaded = sum(event.loaded for event in events.compilations)
    earlier = f", {loaded} of them in an earlier process" if loaded else ""
    return f"compiled {n} graph{'s' if n > 1 else ''}{earlier}"


def _rows(tallies: Mapping[tuple[str, str], Tally], took: str) -> list[str]:
    """Return ``3 x item at train.py:12, waited 4.2 ms for the device``, the longest first."""
    ordered = sorted(tallies.items(), key=lambda entry: -entry[1].seconds)
    return [f"  {t.count} x {what} at {line}, {took.format(f'{1e3 * t.seconds:.1f}')}" for (what, line), t in ordered]
