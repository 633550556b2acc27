"""Choose how the results of a graph on a mesh lie: as what they are computed from element by element.

So the state of an optimizer lies as its parameter from the first step on, and no later step finds an input of
another sharding than the one before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from lazytpu.ir.graph import FROM_PARTS, SHARD, Graph
from lazytpu.ir.op_schema import aten
from lazytpu.ir.sharding import Mesh, Sharding, interned, named_sharding
from lazytpu.ir.tree import Node, Value

_LIKE = {
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.empty_like.default,
    aten.full_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.clone.default,
    aten._to_copy.default,
    aten.copy.default,
    aten.zero.default,
    aten.fill.Scalar,
    aten.detach.default,
    aten.alias.default,
}
_BY_ELEMENT = ("_foreach_", "_fused_")


def with_shardings(graph: Graph, wanted: Sequence[Sharding | None], mesh: Mesh) -> Graph:
    """Return the graph with shardings of its outputs.

    Args:
        wanted: for each output what the tensor that holds it has, None where it has none.
        mesh: that of the step.
    """
    if graph.mesh is None:  # what had a sharding is not needed
        return graph
    known: dict[Value, Sharding | None] = {}
    found = []
    for value, sharding in zip(graph.outputs, wanted, strict=True):
        if sharding is None and not value.layout.size:
            sharding = replicated(mesh, value)
        found.append(_inferred(value, mesh, known) if sharding is None else sharding)
    return replace(graph, shardings=tuple(found))


def of_pending(value: Value, mesh: Mesh) -> Sharding | None:
    """Return the sharding that a value will have as the result of a graph; None where XLA chooses it."""
    return _inferred(value, mesh, {})


def replicated(mesh: Mesh, value: Value) -> Sharding:
    """Return the sharding of a value that every device has all of."""
    return interned(mesh, ((),) * len(value.layout.size))


def _inferred(value: Value, mesh: Mesh, known: dict[Value, Sharding | None]) -> Sharding | None:
    """Return the sharding of the first that has one among the values that this one is computed from by element."""
    waiting = [value]
    while waiting:  # no recursion: a chain of in-place updates is long
        at = waiting[-1]
        if at in known:
            waiting.pop()
            continue
        if at.node is None:
            known[at] = at.sharding or replicated(mesh, at)
        elif at.node.op.name in (SHARD, FROM_PARTS):
            asked = named_sharding(at.node.args[1], len(at.layout.size))
            known[at] = None if asked.is_open else asked
        else:
            sources = [s for s in _same_elements(at) if s.layout.size == at.layout.size]
            unknown = [s for s in sources if s not in known]
            if unknown:
                waiting += unknown
                continue
            shardings = [s for s in map(known.get, sources) if s is not None]
            split = [s for s in shardings if not s.is_replicated]
            every = len(shardings) == len(sources)
            known[at] = split[0] if split else shardings[0] if shardings and every else None
    return known[value]


def _same_elements(value: Value) -> Iterator[Value]:
    """Yield the operands whose elements decide those of a value at the same places."""
    node = value.node
    assert node is not None
    op = node.op.recorded
    if isinstance(op, torch._ops.OpOverload) and op._opname.startswith(_BY_ELEMENT):
        yield from _of_element(node, value)
    elif op in _LIKE or torch.Tag.pointwise in getattr(op, "tags", ()):
        yield from (x for x in (*node.args, *node.kwargs.values()) if type(x) is Value)


def _of_element(node: Node, value: Value) -> Iterator[Value]:
    for group in node.structure if isinstance(node.structure, tuple) else (node.structure,):
        places = group if isinstance(group, list) else []
        if value.index in places:
            n = places.index(value.index)
            for x in (*node.args, *node.kwargs.values()):
                if isinstance(x, (list, tuple)) and len(x) == len(places) and type(x[n]) is Value:
                    yield x[n]
