"""`explain`: every compilation, forced cut, promoted number and fallback, with its cause and line."""

from __future__ import annotations

from lazytpu import events, metrics


def explain() -> str:
    """Why each graph was compiled, what forced each cut, and what ran on the CPU, since the last reset.

    Returns:
        Text for people; ``nothing was compiled`` when there is nothing to say.

    Example:
        >>> print(lazytpu.explain())  # doctest: +SKIP
        compiled 2 graphs
          1  57 ops, 0.61 s: the first graph
             at train.py:20  CNN.c1
    """
    lines = _compilations() + _promotions() + _unreplayed() + _cuts() + _fallbacks()
    return "\n".join(lines) or "nothing was compiled"


def _compilations() -> list[str]:
    if not events.compilations:
        return []
    n = len(events.compilations)
    lines = [f"compiled {n} graph{'s' if n > 1 else ''}"]
    for event in events.compilations:
        cause = event.cause
        lines.append(f"  {event.number}  {len(event.graph.nodes)} ops, {event.seconds:.2f} s: {cause.text}")
        lines.append(f"     at {cause.site.describe()}")
        if cause.other.file and cause.other != cause.site:
            lines.append(f"     was {cause.other.describe()}")
        if cause.remedy:
            lines.append(f"     do {cause.remedy}")
    return lines


def _promotions() -> list[str]:
    rows = [f"  {op} {argument} at {line}" for (op, argument, line) in events.promotions]
    return ["numbers that became inputs because they changed", *rows] if rows else []


def _unreplayed() -> list[str]:
    rows = [f"  {function}: {problem}" for function, problem in events.unreplayed]
    return ["compiled functions that are recorded in every call", *rows] if rows else []


def _cuts() -> list[str]:
    rows = [f"  {n} x {reason} at {line}" for (reason, line), n in events.cuts.most_common()]
    return ["cuts forced by reading a tensor", *rows] if rows else []


def _fallbacks() -> list[str]:
    rows = [f"  {n} x {op}" for op, n in metrics.fallbacks().items()]
    return ["ops that ran on the CPU for want of a lowering", *rows] if rows else []
