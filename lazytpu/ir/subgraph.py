"""A graph inside a graph: the branch of a condition, the body of a loop."""

from __future__ import annotations

import weakref
from textwrap import indent

from lazytpu.ir.graph import Graph
from lazytpu.ir.printer import graph_text
from lazytpu.ir.tree import Node

_known: weakref.WeakValueDictionary[str, Subgraph] = weakref.WeakValueDictionary()


class Subgraph:
    """The body that a higher-order op applies: an argument of its node.

    Equal bodies are one object, so that a node that holds one is found again in the trace tree by identity.
    The inputs of ``graph`` are those the body uses; ``positions`` tells which of its arguments they are.

    Attributes:
        graph: what the body computes.
        positions: for each input of ``graph`` the position of the body's argument.
        constants: for each result that is no tensor of the graph (None, a number) its position and value.
        random: draws random numbers.
    """

    __slots__ = ("__weakref__", "constants", "graph", "positions", "random")

    def __init__(self, graph: Graph, positions: tuple[int, ...], constants: tuple[tuple[int, object], ...]) -> None:
        self.graph, self.positions, self.constants = graph, positions, constants
        self.random = any("rng" in node.kwargs for node in graph.nodes)

    def __repr__(self) -> str:
        """Return the whole body: the text of a graph decides what is compiled, and is what people read."""
        constants = f"  # constants {self.constants}" if self.constants else ""
        return (
            f"body(arguments {list(self.positions)}){constants}\n{indent(graph_text(self.graph, sites=False), '    ')}"
        )


def has_body(node: Node) -> bool:
    """Return whether an op applies a body: a loop, a condition."""
    return any(type(x) is Subgraph for x in (*node.args, *node.kwargs.values()))


def interned(graph: Graph, positions: tuple[int, ...], constants: tuple[tuple[int, object], ...] = ()) -> Subgraph:
    """Return the one body that computes this."""
    made = Subgraph(graph, positions, constants)
    key = repr(made)
    found = _known.get(key)
    if found is None:
        found = _known[key] = made
    return found
