"""Loops in Python, which a trace holds unrolled: found again among its ops, and lowered as loops.

A loop over time steps is as many copies of its body, and XLA compiles each of them.  Here a stretch of nodes that
repeats itself at least eight times becomes one node, a `Loop`, which lowers to ``lax.scan``: compiled in the time of
one body, forward and backward.  Nodes are equal that do the same to operands of equal types; loop_bodies.py says what
may differ between the iterations.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import nlargest

import numpy as np
import torch

from lazytpu.ir.graph import Graph
from lazytpu.ir.op_schema import Arg
from lazytpu.ir.tree import Node, Number, Value, operands
from lazytpu.ir.types import TensorType
from lazytpu.lowering.loop_bodies import LOOP, CopiesError, NotALoopError, loop_of
from lazytpu.lowering.registry import dynamic_arguments, forced

FEWEST_ITERATIONS = 8
_FEWEST_NODES = 96  # of all iterations
# Where XLA fuses the iterations they run faster than a loop, all the more if their arrays do not fit into a cache.
_FEWEST_ELEMENTWISE = 1000
_FEWEST_LARGE = 4000
_LARGE = 1 << 18  # bytes
_MOST_TRIED = 32
_MOST_COPIED = 1 / 16  # of the bytes that the iterations make
_OPS_OF_A_KERNEL = 3  # which XLA fuses, about


def rolled(graph: Graph) -> Graph:
    """Return a graph with its loops as nodes; the graph itself where it has none."""
    if len(graph.nodes) < _FEWEST_NODES or graph.checked or graph.mesh or graph.patterns or forced("unrolled"):
        return graph
    positions = {node: i for i, node in enumerate(graph.nodes)}
    left: set[Node] = set()
    while True:
        nodes = _rolled([*graph.nodes], {*graph.outputs}, positions, left)
        if nodes is None:
            return graph
        loops = [node for node in nodes if node.op is LOOP]
        rows = {value for node in loops for value in node.args[0].kept}
        results = {*graph.outputs}
        unwanted = [node.args[0] for node in loops if _copies(node, rows) or _is_taken_apart(node, results)]
        if not unwanted:
            return replace(graph, nodes=tuple(nodes))
        for loop in unwanted:
            start, length = loop.positions[0], loop.iterations * len(loop.body.nodes)
            left.update(graph.nodes[start : start + length])


def _copies(node: Node, rows: set[Value]) -> bool:
    """Return whether a loop needs copies, side by side, of much that no other loop gives it so."""
    loop = node.args[0]
    copied = sum(v.layout.nbytes for values in node.args[3] for v in {*values} - rows)
    made = sum(v.layout.nbytes for inside in loop.body.nodes for v in inside.results)
    return bool(copied > _MOST_COPIED * made * loop.iterations)


def _is_taken_apart(node: Node, results: set[Value]) -> bool:
    """Return whether so many of the rows that a loop keeps are results that cutting them out costs what it saves."""
    loop = node.args[0]
    return bool(len(results & loop.kept.keys()) * _OPS_OF_A_KERNEL > loop.iterations * len(loop.body.nodes))


def ops_to_compile(graph: Graph) -> int:
    """Return how many ops XLA compiles of a graph: those of the iterations of a loop once."""
    return sum(ops_to_compile(node.args[0].body) if node.op is LOOP else 1 for node in rolled(graph).nodes)


def _rolled(nodes: list[Node], outputs: set[Value], positions: dict[Node, int], left: set[Node]) -> list[Node] | None:
    """Return the nodes with loops in place of what repeats itself; ``left`` is in none of them."""
    numbers: dict[Hashable, int] = {}
    alike = np.array([numbers.setdefault(_signature(node), len(numbers)) for node in nodes])
    found = False
    while True:
        stretches = nlargest(_MOST_TRIED, _stretches(alike), key=lambda x: (x.saved, -x.period))
        loops = (_loop_in(nodes, stretch, outputs, positions, left) for stretch in stretches)
        loop = next((x for x in loops if x is not None), None)
        if loop is None:
            return nodes if found else None
        node, start, stop = loop
        nodes = [*nodes[:start], node, *nodes[stop:]]
        alike = np.concatenate([alike[:start], [len(numbers)], alike[stop:]])
        numbers[node] = len(numbers)
        found = True


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Nodes ``start`` to ``start + period * iterations``, of which each is like the one ``period`` before it."""

    start: int
    period: int
    iterations: int

    @property
    def saved(self) -> int:
        """Nodes that need not be compiled."""
        return self.period * (self.iterations - 1)


def _stretches(alike: np.ndarray) -> Iterator[_Stretch]:
    """Yield the stretches that repeat themselves often enough."""
    for period in range(1, len(alike) // FEWEST_ITERATIONS + 1):
        same = alike[:-period] == alike[period:]
        if np.count_nonzero(same) < max(period * (FEWEST_ITERATIONS - 1), _FEWEST_NODES - period):
            continue
        edges = np.flatnonzero(np.diff(np.concatenate([[False], same, [False]]).astype(np.int8)))
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            iterations = (int(stop - start) + period) // period
            if iterations >= FEWEST_ITERATIONS and iterations * period >= _FEWEST_NODES:
                yield _Stretch(int(start), period, iterations)


def _signature(node: Node) -> Hashable:
    """Return what nodes have in common that may stand for one another in iterations of a loop."""
    if node.op is LOOP:
        return node
    varying = {*dynamic_arguments(node.op.recorded)}
    names = [a.name for a in node.op.arguments]
    args = [_part(x, names[i] in varying) for i, x in enumerate(node.args)]
    kwargs = [(name, _part(x, name in varying)) for name, x in node.kwargs.items()]
    layouts = [*[None if v is None else v.layout for v in node.values], *(node.natural or ())]
    types = [None if layout is None else _type(layout) for layout in layouts]
    return node.op, *args, *kwargs, *types, len(node.values)


def _type(layout: TensorType) -> Hashable:
    return layout.size, layout.stride, layout.dtype


def _part(x: Arg, varying: bool = False) -> Hashable:
    if type(x) is Value:
        return _type(x.layout)
    if type(x) is Number:
        return x.kind, x.dtype
    if varying and type(x) is int:
        return "varying"
    if isinstance(x, (list, tuple)):
        return tuple([_part(e) for e in x])
    return (type(x), repr(x)) if isinstance(x, float) else (type(x), x)


def _loop_in(
    nodes: list[Node], stretch: _Stretch, outputs: set[Value], positions: dict[Node, int], left: set[Node]
) -> tuple[Node, int, int] | None:
    """Return the node for a stretch, or for most of it, and which nodes it stands for; None where they are no loop."""
    for before, behind in ((0, 0), (1, 0), (2, 0), (0, 1), (1, 1)):  # the first iterations may find other operands
        iterations = stretch.iterations - before - behind
        start, stop = stretch.start + before * stretch.period, stretch.start + (before + iterations) * stretch.period
        if iterations < FEWEST_ITERATIONS or iterations * stretch.period < _FEWEST_NODES:
            continue
        inside = nodes[start:stop]
        if not left.isdisjoint(inside):
            continue
        if not _pays(inside, stretch.period):
            return None
        needed = {x for node in (*nodes[:start], *nodes[stop:]) for x in operands(node) if type(x) is Value}
        try:
            return loop_of(inside, stretch.period, iterations, needed | outputs, positions), start, stop
        except NotALoopError:
            continue
        except CopiesError:
            break
    return None


def _pays(inside: Sequence[Node], period: int) -> bool:
    """Return whether the iterations are more than what XLA fuses into one another."""
    body = inside[:period]
    if all(_is_constant(node) for node in body):
        return False
    if not all(_is_elementwise(node) for node in body):
        return True
    large = max(v.layout.nbytes for n in body for v in n.results) > _LARGE
    return len(inside) >= (_FEWEST_LARGE if large else _FEWEST_ELEMENTWISE)


def _is_constant(node: Node) -> bool:
    """Return whether what an op makes depends on nothing: XLA folds it into what uses it."""
    return not node.op.random and not any(True for _ in operands(node))


def _is_elementwise(node: Node) -> bool:
    tags = getattr(node.op.recorded, "tags", ())
    return torch.Tag.pointwise in tags or node.op.is_view or _is_constant(node)
