"""Split a graph at its collectives: each becomes a graph of its own, and so does what lies between two of them."""

from __future__ import annotations

from lazytpu.ir.graph import Graph
from lazytpu.ir.rank_patterns import COLLECTIVES
from lazytpu.ir.tree import Node, Number, Value, operands


def pieces_of(graph: Graph) -> list[Graph]:
    """Return graphs that compute the same, one after the other, in the order of recording.

    The inputs of a piece are inputs of the graph or results of pieces before it; nothing is donated.
    """
    parts: list[list[Node]] = [[]]
    for node in graph.nodes:
        if node.op.name in COLLECTIVES:
            parts += [[node], []]
        else:
            parts[-1].append(node)
    parts = [part for part in parts if part]
    needed = set(graph.outputs)
    found: list[Graph] = []
    for part in reversed(parts):
        made = [v for node in part for v in node.results]
        uses = dict.fromkeys(x for node in part for x in operands(node) if type(x) is Value)
        inputs = tuple([v for v in uses if v not in set(made)])
        outputs = tuple([v for v in made if v in needed])
        needed |= set(inputs)
        numbers = any(type(x) is Number for node in part for x in operands(node))
        found.append(Graph(tuple(part), inputs, outputs, (), graph.counts if numbers else (0, 0, 0)))
    return found[::-1]


def collectives_of(graph: Graph) -> list[Node]:
    """Return the collectives of a graph, in the order of recording."""
    return [node for node in graph.nodes if node.op.name in COLLECTIVES]
