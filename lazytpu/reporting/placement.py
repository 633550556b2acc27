"""The placement log (``LAZYTPU_LOG=placement``): on which device each op runs.

An op is told of once for each place in the trace tree, when its step is cut; an op that is recorded again costs
nothing.
"""

from __future__ import annotations

from lazytpu.config import config
from lazytpu.executing import runtime
from lazytpu.ir.site import Site
from lazytpu.ir.tree import Node, Trace
from lazytpu.reporting import logs

_on_host: set[tuple[str, Site]] = set()


def note_new_ops(trace: Trace) -> None:
    """Logs the ops that this step has added to the trace tree; called at the cut."""
    if trace.parted is None or not logs.is_on("placement"):
        return
    nodes: list[Node] = []
    node: Node | None = trace.cursor
    while node is not None and node is not trace.parted[0]:
        nodes.append(node)
        node = node.parent
    where = f"{config.device_name}:0 ({runtime.device()})"
    for node in reversed(nodes):
        types = ", ".join(repr(value.layout) for value in node.values if value is not None)
        _note(node.op.name, types, where, node.site)


def note_on_host(op: str, site: Site) -> None:
    """Logs an op that runs on the CPU: a fallback, or one whose result's shape depends on data."""
    if logs.is_on("placement") and (op, site) not in _on_host:
        _on_host.add((op, site))
        _note(op, "", "cpu", site)


def _note(op: str, types: str, where: str, site: Site) -> None:
    logs.note("placement", "placed %s: %s  # %s", f"{op} {types}".rstrip(), where, site.describe())
