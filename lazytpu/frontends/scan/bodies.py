"""The two bodies of a loop over layers, made of the path that one iteration of it recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lazytpu.ir.graph import Graph
from lazytpu.ir.op_schema import op_of
from lazytpu.ir.subgraph import Subgraph, interned
from lazytpu.ir.tree import Node, Number, Value, operands
from lazytpu.passes.clone import cloned, replaced
from lazytpu.tensors.layout import Layout, layout_of, root_layout

_NUMBER_TYPES = {float: torch.float64, int: torch.int64, bool: torch.bool, complex: torch.complex128}
_FULL = op_of(torch.ops.aten.full.default)


@dataclass(frozen=True, slots=True)
class Bodies:
    """What one path of the first layer was made into.

    Attributes:
        forward, backward: the bodies; ``backward`` is None where nothing needs a gradient.
        kept: types of what the forward body keeps for the backward one.
        sums: positions of the constants that have a gradient.
        learned: positions of the layer's own tensors that have one.
        random: whether numbers are drawn.
        captured: values of the path around that the layer uses.
    """

    forward: Subgraph
    backward: Subgraph | None
    kept: tuple[Layout, ...]
    sums: tuple[int, ...]
    learned: tuple[int, ...]
    random: bool
    captured: tuple[Value, ...]


def numbers_of(
    last: Node, floats: Sequence[float], ints: Sequence[int], complexes: Sequence[complex]
) -> tuple[list[object], dict[object, int]]:
    """Return the numbers from Python on a path, and the place of each among them by kind and index."""
    by_kind: dict[str, Sequence[complex]] = {"f": floats, "i": ints, "c": complexes}
    numbers: list[object] = []
    positions: dict[object, int] = {}
    for node in last.path():
        for x in operands(node):
            if type(x) is Number and x.dtype != "rng" and (x.kind, x.index) not in positions:
                positions[x.kind, x.index] = len(numbers)
                value = by_kind[x.kind][x.index]
                numbers.append(torch.tensor(value, dtype=x.dtype) if isinstance(x.dtype, torch.dtype) else value)
    return numbers, positions


def partition(
    end: Node,
    last: Node,
    y: Value,
    values: Sequence[Value],
    seed: Value | None,
    gradients: dict[int, Value | None],
    numbers: dict[object, int],
    constants: int,
    checkpoint: bool,
) -> Bodies:
    """Split a path into the two bodies.

    Args:
        end: the last node of the forward pass, ``last`` that of the backward pass.
        y: what the layer gives.
        values: what stands for the input, the constants and the layer's own tensors.
        seed: what stands for the gradient of ``y``; None where nothing needs one.
        gradients: positions in ``values`` to their gradients.
        numbers: places of the numbers.
    """
    path = last.path()
    forward, backward = path[: end.depth], path[end.depth :]
    here = set(path)
    placeholders = {*values, seed}
    captured = list(
        dict.fromkeys(
            v for n in path for v in operands(n) if type(v) is Value and v.node not in here and v not in placeholders
        )
    )
    x, given, own = values[0], values[1 : 1 + constants], values[1 + constants :]
    shared = [*own, *given, *captured]
    build = _Builder(path, numbers)
    if seed is None:
        body = build.body(forward, [x, *shared], [y])
        return Bodies(body, None, (), (), (), body.random, tuple(captured))
    wanted = [gradients.get(0), *[gradients.get(i) for i in range(1, len(values))]]
    sums = tuple([i for i in range(constants) if wanted[1 + i] is not None])
    learned = tuple([i for i in range(len(own)) if wanted[1 + constants + i] is not None])
    results = [wanted[0] or build.zeros(layout_of(x.layout)), *[wanted[1 + i] for i in sums]]
    results += [wanted[1 + constants + i] for i in learned]
    if checkpoint:
        kept, run = [x], path
    else:
        made = {v for n in forward for v in n.values} | {x}
        kept, run = _used(backward, results, made), backward
    body = build.body(forward, [x, *shared], [y, *kept])
    reverse = build.body(run, [seed, *kept, *shared], results)
    random = body.random or reverse.random
    return Bodies(body, reverse, tuple([layout_of(v.layout) for v in kept]), sums, learned, random, tuple(captured))


def _used(nodes: Sequence[Node], results: Sequence[Any], among: set[Any]) -> list[Value]:
    """Return the values ``among`` those given that nodes need for their results, in order of use."""
    needed, found = {v for v in results if v is not None}, {v: None for v in results if v in among}
    for node in reversed(nodes):
        if needed.isdisjoint(node.values):
            continue
        for x in operands(node):
            if type(x) is Value:
                needed.add(x)
                if x in among:
                    found[x] = None
    return list(found)


class _Builder:
    """Makes bodies of parts of one path; a random op has one key in all of them."""

    def __init__(self, path: Sequence[Node], numbers: dict[Any, int]) -> None:
        self.numbers = numbers
        drawing = [node for node in path if "rng" in node.kwargs]
        self.draws = {node: i for i, node in enumerate(drawing)}
        self._zeros: dict[Value, Node] = {}

    def zeros(self, layout: Layout) -> Value:
        """Return a value of zeros, to be used as a result."""
        node = Node(None)
        node.op, node.args, node.kwargs = _FULL, (list(layout.size), 0.0), {"dtype": layout.dtype}
        node.set_results((layout,), 0)
        self._zeros[node.value] = node
        return node.value

    def body(self, nodes: Sequence[Node], arguments: Sequence[Value], results: Sequence[Any]) -> Subgraph:
        """Return the body that computes ``results`` of ``arguments`` and the numbers behind them."""
        nodes = [*[self._zeros[v] for v in results if v in self._zeros], *nodes]
        known: dict[Any, Value] = {v: Value(None, i, v.layout) for i, v in reversed(list(enumerate(arguments)))}
        needed = {v for v in results if v not in known}
        kept = []
        for node in reversed(nodes):
            if not needed.isdisjoint(node.values):
                kept.append(node)
                needed |= {x for x in operands(node) if type(x) is Value and x not in known}
        made, inputs = [], {known[v]: None for v in results if v in known}
        for node in reversed(kept):
            made.append(self._copy(node, known, len(arguments), inputs))
        used = sorted(inputs, key=lambda v: v.index)
        graph = Graph(tuple(made), tuple(used), tuple([known[v] for v in results]), (), (0, 2 * len(self.draws), 0))
        return interned(graph, tuple([v.index for v in used]))

    def _copy(self, node: Node, known: dict[object, Value], base: int, inputs: dict[Value, None]) -> Node:
        def copied(x: Value | Number) -> Value | Number:
            if isinstance(x, Number) and x.dtype == "rng":
                return Number("i", 2 * self.draws[node], "rng")
            key = (x.kind, x.index) if isinstance(x, Number) else x
            if isinstance(x, Number) and key not in known:
                dtype = _NUMBER_TYPES.get(x.dtype, x.dtype)
                known[key] = Value(None, base + self.numbers[key], root_layout((), (), dtype))
            value = known[key]
            if value.node is None:
                inputs[value] = None
            return value

        args = tuple([replaced(x, copied) for x in node.args])
        kwargs = {k: replaced(x, copied) for k, x in node.kwargs.items()}
        made = cloned(node, args, kwargs, results=False)
        known.update((old, new) for old, new in zip(node.values, made.values, strict=True) if old and new)
        return made
