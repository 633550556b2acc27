"""Log on which device each op runs (``LAZYTPU_LOG=placement``).

An op is logged once for each node of the trace tree, when its step is cut; an op that is recorded again, or replayed,
costs nothing.  Ops of a captured graph (`lazytpu.jit`, ``torch.compile``) are logged when it is compiled.
"""

from __future__ import annotations

from collections.abc import Iterable

from lazytpu.config import config
from lazytpu.ir.op_schema import OpOverload, display_name
from lazytpu.ir.site import Site
from lazytpu.ir.subgraph import Subgraph
from lazytpu.ir.tree import Node, Trace
from lazytpu.location import site
from lazytpu.observe import logs
from lazytpu.runtime import client

_on_host: set[tuple[str, Site]] = set()


def note_new_ops(trace: Trace) -> None:
    """Log the ops that this step has added to the trace tree; called at the cut."""
    if trace.diverged is None or not logs.is_on("placement"):
        return
    nodes: list[Node] = []
    node: Node | None = trace.cursor
    while node is not None and node is not trace.diverged[0]:
        nodes.append(node)
        node = node.parent
    note_ops(reversed(nodes))


def note_ops(nodes: Iterable[Node], around: Site | None = None) -> None:
    """Log ops that run on the device, with those in the bodies of loops and conditions.

    Args:
        around: the site of ops that have none of their own.
    """
    if not logs.is_on("placement"):
        return
    where = f"{config.device_name}:0 ({client.device()})"
    for node in nodes:
        types = ", ".join(repr(value.layout) for value in node.values if value is not None)
        at = node.site if node.site.file else around
        _note(node.op.name, types, where, at)
        for x in (*node.args, *node.kwargs.values()):
            if isinstance(x, Subgraph):
                note_ops(x.graph.nodes, at)


def note_on_host(overload: OpOverload) -> None:
    """Log an op that runs on the CPU: a fallback, or one whose result's shape depends on data."""
    if not logs.is_on("placement"):
        return
    key = display_name(overload), site.line_of_read()
    if key not in _on_host:
        _on_host.add(key)
        _note(key[0], "", "cpu", key[1])


def _note(op: str, types: str, where: str, at: Site | None) -> None:
    line = at.describe() if at is not None else "?"
    logs.note("placement", "placed %s: %s  # %s", f"{op} {types}".rstrip(), where, line)
