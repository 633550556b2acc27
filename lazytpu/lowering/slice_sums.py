"""Sums of the gradients of slices: a loop over time that reads ``x[:, t]`` gives one as large as ``x`` at each step.

Each is 0 but for its slice, and autograd adds them up.  XLA on CPUs makes one loop of the sum, which looks at every
step for each element of ``x``, and computes what it finds there anew.  Where the slices lie apart, their gradients are
put side by side instead, each computed once: the program does as much work as eager torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import torch
from jax import lax

from lazytpu.ir.graph import Graph
from lazytpu.ir.tree import Node, Value, operands
from lazytpu.lowering.registry import on_one_cpu

aten = torch.ops.aten
_FEWEST = 4  # slices from which it pays
_ADD, _SELECT, _SLICE = aten.add.Tensor, aten.select_backward.default, aten.slice_backward.default


@dataclass(frozen=True, slots=True)
class Part:
    """A gradient of a slice: the rows ``start`` to ``stop`` of a dimension."""

    axis: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Sum:
    """What a value is the sum of.

    Attributes:
        parts: gradients of slices of one dimension; those of equal rows are added, others lie apart.
        rest: other terms.
    """

    parts: dict[Value, Part]
    rest: tuple[Value, ...]


class SliceSums:
    """The sums of a graph, and the arrays of their terms as a call goes on.

    Attributes:
        sums: the last addition of each to the sum.
    """

    def __init__(self, graph: Graph) -> None:
        self.sums = _sums_of(graph) if on_one_cpu() else {}
        self._parts = {value: part for found in self.sums.values() for value, part in found.parts.items()}
        self._rest = {value for found in self.sums.values() for value in found.rest}

    def call(self) -> SumsOfCall | None:
        """Return what holds the arrays of a call; None where there is no sum."""
        return SumsOfCall(self.sums, self._parts, self._rest, {}) if self.sums else None


@dataclass(frozen=True, slots=True)
class SumsOfCall:
    """The terms of the sums, of one call."""

    sums: dict[Node, Sum]
    parts: dict[Value, Part]
    rest: set[Value]
    arrays: dict[Value, jax.Array]

    def note(self, node: Node, args: Sequence[jax.Array]) -> None:
        """Keep the operands of a node that are needed for a sum: where it ends they may be gone."""
        part = self.parts.get(node.value)
        if part is not None:
            self.arrays[node.value] = args[0] if node.op.recorded is _SLICE else lax.expand_dims(args[0], [part.axis])
        elif node.op.recorded is _ADD:
            given = zip(node.args, args, strict=True)
            self.arrays.update((x, array) for x, array in given if type(x) is Value and x in self.rest)

    def total(self, node: Node) -> jax.Array:
        """Return the sum that ``node`` completes."""
        found = self.sums[node]
        rows: dict[tuple[int, int], jax.Array] = {}
        for value, part in found.parts.items():
            array, place = self.arrays[value], (part.start, part.stop)
            rows[place] = rows[place] + array if place in rows else array
        axis, shape = part.axis, list(node.value.layout.size)
        side_by_side, end = [], 0
        for (start, stop), array in sorted(rows.items(), key=lambda item: item[0]):
            side_by_side += [_zeros(shape, axis, start - end, array), array]
            end = stop
        side_by_side.append(_zeros(shape, axis, shape[axis] - end, array))
        total = lax.concatenate([x for x in side_by_side if x is not None], axis)
        for value in found.rest:
            total = total + self.arrays[value]
        return total


def _zeros(shape: list[int], axis: int, rows: int, like: jax.Array) -> jax.Array | None:
    return jnp.zeros([*shape[:axis], rows, *shape[axis + 1 :]], like.dtype) if rows else None


def _sums_of(graph: Graph) -> dict[Node, Sum]:
    if sum(node.op.recorded in (_SELECT, _SLICE) for node in graph.nodes) < _FEWEST:
        return {}
    made_by = {value: node for node in graph.nodes for value in node.results}
    readers = Counter([x for node in graph.nodes for x in operands(node) if type(x) is Value])
    readers.update(graph.outputs)
    inner = {node for node in graph.nodes if _adds(node) and readers[node.value] == 1}
    inside = {x for node in graph.nodes if _adds(node) for x in _operands(node) if made_by.get(x) in inner}
    sums = {}
    for node in graph.nodes:
        if _adds(node) and node.value not in inside and (found := _sum(node, made_by, inner, readers)) is not None:
            sums[node] = found
    return sums


def _adds(node: Node) -> bool:
    """Return whether a node adds two values of one type."""
    if node.op.recorded is not _ADD or node.kwargs or len(node.args) != 2 or node.natural is not None:
        return False
    types = [(x.layout.size, x.layout.dtype) for x in (*node.args, node.value) if type(x) is Value]
    return len(types) == 3 and len({*types}) == 1


def _sum(last: Node, made_by: dict[Value, Node], inner: set[Node], readers: Counter[Value]) -> Sum | None:
    """Return what a node is the last addition of, where slices of one dimension are enough of it."""
    parts: dict[Value, Part] = {}
    rest: list[Value] = []
    taken: dict[int, Part] = {}  # rows of the dimension
    pending = _operands(last)
    while pending:
        value = pending.pop()
        node = made_by.get(value)
        if node is not None and node in inner:
            pending += _operands(node)
            continue
        part = _part(node) if node is not None and readers[value] == 1 else None
        if part is not None and _fits(part, taken):
            parts[value] = part
            taken.update(dict.fromkeys(range(part.start, part.stop), part))
        else:
            rest.append(value)
    return Sum(parts, tuple(rest)) if len(parts) >= _FEWEST else None


def _operands(node: Node) -> list[Value]:
    return [x for x in node.args if type(x) is Value]


def _fits(part: Part, taken: dict[int, Part]) -> bool:
    """Return whether a part has the rows of one that is there, or lies beside all of them."""
    there = {taken.get(row) for row in range(part.start, part.stop)}
    return there == {part} or (there == {None} and part.axis == next(iter(taken.values()), part).axis)


def _part(node: Node) -> Part | None:
    """Return the rows that a gradient of a slice is not 0 in, where they are known."""
    op, args, size = node.op.recorded, node.args, node.value.layout.size if node.value is not None else ()
    if op not in (_SELECT, _SLICE) or node.natural is not None or not all(type(x) is int for x in args[2:]):
        return None
    axis, start = args[2] % len(size), args[3]
    start += size[axis] if start < 0 else 0
    if op is _SELECT:
        return Part(axis, start, start + 1)
    rows = args[0].layout.size[axis]
    return Part(axis, start, start + rows) if args[5] == 1 and rows and 0 <= start <= size[axis] - rows else None
