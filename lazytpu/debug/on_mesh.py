"""Describe a compiled graph that lies on a mesh: devices, parts of its inputs, and what the devices send."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from lazytpu.debug import hlo
from lazytpu.debug.collectives import Collective, collectives_of
from lazytpu.debug.folder import JsonObject
from lazytpu.debug.graph_text import optimized_hlo_of
from lazytpu.diagnosis import events
from lazytpu.ir.graph import Graph
from lazytpu.ir.tree import Value
from lazytpu.observe.metrics_tables import size

REASONS = {
    "sum": "sums over a dimension that is split",
    "input": "inputs that are split and needed whole",
    "mark": "intermediate results that are marked",
    "": "nobody asked for",
}
_MOST_PROGRAMS, _MOST_ROWS = 5, 12  # that `explain` lists


def mesh_table(graph: Graph, text: str) -> JsonObject:
    """Return the mesh of a graph, the parts of its inputs, and its collectives; empty for one of one device.

    Args:
        text: its optimized HLO.
    """
    mesh = graph.mesh
    if mesh is None:
        return {}
    names = graph.names
    return {
        "axes": mesh.axes,
        "devices": list(mesh.devices),
        "inputs": [
            {
                "name": names[value],
                "type": value.layout.describe(),
                "sharding": "{replicated}" if value.sharding is None else value.sharding.describe(),
                "bytes": bytes_on_each(value),
            }
            for value in graph.inputs
        ],
        "collectives": collective_rows(collectives_of(hlo.parse(text), mesh, graph)),
    }


def bytes_on_each(value: Value) -> int:
    """Return the bytes of an input that one device has, padding included."""
    whole: int = value.layout.nbytes
    if value.sharding is None or not whole:
        return whole
    elements = prod(value.layout.size)
    part = prod(value.sharding.padded(value.layout.size)) // prod(value.sharding.parts)
    return whole // elements * part


def collective_rows(found: Sequence[Collective]) -> list[JsonObject]:
    """Return a row for each kind, axis, reason, op and line, those of most bytes first."""
    rows: dict[tuple[object, ...], JsonObject] = {}
    for one in found:
        if one.group < 2:
            continue
        key = (one.kind, one.axis, one.reason, one.op, one.at)
        row = rows.setdefault(
            key,
            {"kind": one.kind, "axis": one.axis, "devices": one.group, "reason": REASONS[one.reason]}
            | {"op": one.op, "at": one.at, "count": 0, "bytes": 0},
        )
        row["count"] += one.runs
        row["bytes"] += one.total_bytes
    return sorted(rows.values(), key=lambda row: (-row["bytes"], row["kind"], row["at"]))


def explained() -> Iterator[str]:
    """Yield lines about what the devices of a mesh send in a run of each of the latest programs."""
    graphs = [e for e in events.compilations if e.graph.mesh is not None and e.executable is not None]
    for event in graphs[-_MOST_PROGRAMS:]:
        mesh = event.graph.mesh
        assert mesh is not None
        try:
            module = hlo.parse(optimized_hlo_of(event.executable.compiled))
        except Exception as error:  # a program that was loaded from disk may have no text
            yield f"  graph {event.number} on mesh {mesh.describe()}: not known ({type(error).__name__})"
            continue
        rows = collective_rows(collectives_of(module, mesh, event.graph))
        total = size(sum(row["bytes"] for row in rows))
        many = f"{sum(row['count'] for row in rows)} collectives, {total}" if rows else "none"
        yield f"  graph {event.number} on mesh {mesh.describe()}: {many}"
        shown = [row for i, row in enumerate(rows) if i < _MOST_ROWS or row["reason"] == REASONS[""]]
        for row in shown:
            at = f", {row['op']} at {row['at']}" if row["op"] else ""
            yield f"    {row['count']} x {row['kind']} over {row['axis']}, {size(row['bytes'])}: {row['reason']}{at}"
        if len(rows) > len(shown):
            yield f"    and {len(rows) - len(shown)} smaller kinds"
