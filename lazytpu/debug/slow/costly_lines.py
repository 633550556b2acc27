"""The lines and modules of the program that cost most: of what the device runs, or of what the host records.

What the device takes is measured where a profile was taken (`lazytpu.profiler`), else estimated (weights.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from lazytpu.debug import op_times
from lazytpu.debug.slow.weights import device_cost, host_cost
from lazytpu.diagnosis import events
from lazytpu.ir.graph import Graph
from lazytpu.ir.site import Site
from lazytpu.ir.tree import Node

MOST = 5
MEASURED = "measured by the profile"
_LEAST = 0.005  # of all, from which on a line is listed
_MOST_GRAPHS = 20  # those that ran most: a step that compiles each time has a thousand


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the program, in one module, and its part of a step.

    Attributes:
        site: the line, and the module that is called there.
        share: of all, from 0 to 1.
        ops: names of the costliest ops there.
    """

    site: Site
    share: float
    ops: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Lines:
    """The costliest lines.

    Attributes:
        rows: at most `MOST`, the costliest first.
        how: how that is known.
    """

    rows: tuple[Line, ...]
    how: str


def device_lines() -> Lines:
    """Return the lines on which the device spends most."""
    if op_times.measured:
        return Lines(_ranked(op_times.measured), MEASURED)
    rows = ((node, runs * device_cost(node)) for graph, runs in graphs_in_use() for node in graph.nodes)
    return Lines(_ranked(rows), "estimated from FLOPs and bytes; lazytpu.profiler.trace measures")


def host_lines() -> Lines:
    """Return the lines on which the host records most."""
    rows = ((node, runs * host_cost(node)) for graph, runs in graphs_in_use() for node in graph.nodes)
    return Lines(_ranked(rows), "estimated from the ops recorded there and their tensors")


def graphs_in_use() -> Iterator[tuple[Graph, int]]:
    """Yield the compiled graphs that ran most, with how often."""
    known = sorted(events.compilations, key=lambda e: -e.usage.runs)[:_MOST_GRAPHS]
    yield from ((e.graph, e.usage.runs) for e in known if e.usage.runs)


def cost_of(wanted: Callable[[Graph, Node], bool]) -> tuple[float, Site | None, Node | None]:
    """Return what part of the device's work the wanted ops are, and the line and op of the costliest of them."""
    total = 0.0
    found: dict[Node, float] = {}
    for graph, runs in graphs_in_use():
        for node in graph.nodes:
            cost = runs * device_cost(node)
            total += cost
            if cost and wanted(graph, node):
                found[node] = found.get(node, 0.0) + cost
    lines = _ranked(found.items())
    if not total or not lines:
        return 0.0, None, None
    costliest = max(found, key=lambda n: found[n] * (_place(n.site) == _place(lines[0].site)))
    return sum(found.values()) / total, lines[0].site, costliest


def _place(site: Site) -> tuple[str, int, str]:
    return site.file, site.line, site.module


def _ranked(rows: Iterable[tuple[Node | None, float]]) -> tuple[Line, ...]:
    """Return the costliest lines and modules; an op and its gradient are at one."""
    total = 0.0
    lines: dict[tuple[str, int, str], dict[str, float]] = {}
    for node, cost in rows:
        total += cost
        if node is not None and node.site.file and cost:
            ops = lines.setdefault(_place(node.site), {})
            ops[node.op.name] = ops.get(node.op.name, 0.0) + cost
    costs = {place: sum(ops.values()) for place, ops in lines.items()}
    costliest = sorted(costs, key=lambda place: -costs[place])[:MOST]
    return tuple(
        [
            Line(Site(*place), costs[place] / total, tuple(sorted(lines[place], key=lambda op: -lines[place][op])[:3]))
            for place in costliest
            if costs[place] >= _LEAST * total
        ]
    )
