"""Foreach ops, tensor by tensor.

An optimizer updates its parameters by one foreach op after the other, each over lists of them all.  Here the ops in
a row are lowered for the first parameter, then for the second, and so on, and where parameters have equal types the
function for one of them is traced once and called for each.  XLA inlines the calls, so what it compiles is the same;
but there are as many calls as parameters, not that times as many ops, which for small layers is half of the time
that lowering and XLA's passes take.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import jax

from lazytpu.ir.graph import Graph
from lazytpu.ir.op_schema import Arg
from lazytpu.ir.tree import Node, Number, Value, operands
from lazytpu.lowering.registry import Kwargs
from lazytpu.lowering.rules.foreach import element_rule

_FEWEST_SHARED = 4  # rows: fewer of equal types are not worth a function of their own

LowerElement: TypeAlias = Callable[[Node, int, Sequence[Arg], Kwargs], jax.Array]
"""Lowers one element of a foreach op: the node, which element, its arguments."""
Call: TypeAlias = tuple[Sequence[Arg], Kwargs]
"""The arguments of one op of a row, `_Inner` and `_Outer` among them."""


@dataclass(frozen=True)
class _Inner:
    """A result of an earlier op of the same row."""

    op: int


@dataclass(frozen=True)
class _Outer:
    """An argument of the row."""

    position: int


def stretches_of(graph: Graph, apart: set[Value]) -> list[range]:
    """Return the indices of a graph's nodes: foreach ops that can be lowered row by row together, others alone.

    Args:
        apart: values that something is done to between the op that makes them and those that use them.
    """
    found: list[range] = []
    made: dict[Value, int] = {}
    for index, node in enumerate(graph.nodes):
        by_element = is_by_element(node)
        joins = made and by_element and _fits(node, made, apart)
        if joins and len(node.values) == len(graph.nodes[index - 1].values):
            found[-1] = range(found[-1].start, index + 1)
        else:
            found.append(range(index, index + 1))
            made = {}
        if by_element:
            made |= {value: i for i, value in enumerate(node.results)}
    return found


def is_by_element(node: Node) -> bool:
    """Return whether an op is a foreach op that is lowered element by element."""
    if not isinstance(node.structure, list) or element_rule(node.op.recorded) is None:
        return False
    return {len(x) for x in (*node.args, *node.kwargs.values()) if isinstance(x, (list, tuple))} == {len(node.values)}


def _fits(node: Node, made: Mapping[Value, int], apart: set[Value]) -> bool:
    """Return whether each element of an op needs, of what the ops before it made, results of its own row only."""
    if any(x in made and x in apart for x in operands(node) if type(x) is Value):
        return False
    for argument in (*node.args, *node.kwargs.values()):
        if isinstance(argument, (list, tuple)):
            if any(type(x) is Value and made.get(x, i) != i for i, x in enumerate(argument)):
                return False
        elif type(argument) is Value and argument in made:
            return False
    return True


def lower_rows(
    nodes: Sequence[Node], array_of: Callable[[Value | Number], jax.Array], needed: set[Value], lower: LowerElement
) -> dict[Value, jax.Array]:
    """Lower a stretch of foreach ops.

    Args:
        nodes: the ops.
        array_of: gives the arrays of what comes from before them.
        needed: the results that something behind them needs.
        lower: lowers one element of one of them.

    Returns:
        The results needed, with their arrays.
    """
    results_of = [node.results for node in nodes]
    made = {v: k for k, values in enumerate(results_of) for v in values}
    rows = [_row(nodes, i, made) for i in range(len(results_of[0]))]
    arrays = [[array_of(x) for x in outer] for _, outer in rows]
    kept = [[k for k, values in enumerate(results_of) if values[i] in needed] for i in range(len(rows))]
    keys = [
        (
            repr(calls),
            *[(x.shape, x.dtype, x.weak_type) for x in given],
            *[(values[i].layout.size, values[i].layout.dtype) for values in results_of],
            *ops,
        )
        for i, ((calls, _), given, ops) in enumerate(zip(rows, arrays, kept, strict=True))
    ]
    often = {key for key, n in Counter(keys).items() if n >= _FEWEST_SHARED}
    shared: dict[Hashable, Callable[..., list[jax.Array]]] = {}
    results: dict[Value, jax.Array] = {}
    for i, ((calls, _), given, ops, key) in enumerate(zip(rows, arrays, kept, keys, strict=True)):
        row = shared.get(key)
        if row is None:
            row = _function(nodes, i, calls, ops, lower)
            if key in often:
                row = shared[key] = jax.jit(row)
        results |= zip([results_of[k][i] for k in ops], row(*given), strict=True)
    return results


def _row(nodes: Sequence[Node], i: int, made: Mapping[Value, int]) -> tuple[list[Call], list[Value | Number]]:
    """Return the arguments of the ``i``-th element of each op, and what of them comes from outside."""
    outer: dict[Value | Number, _Outer] = {}

    def element(argument: Arg) -> Arg:
        x = argument[i] if isinstance(argument, (list, tuple)) else argument
        if type(x) is Value and x in made:
            return _Inner(made[x])
        if type(x) is Value or type(x) is Number:
            return outer.setdefault(x, _Outer(len(outer)))
        return x

    calls: list[Call] = [
        ([element(x) for x in node.args], {k: element(x) for k, x in node.kwargs.items()}) for node in nodes
    ]
    return calls, list(outer)


def _function(
    nodes: Sequence[Node], i: int, calls: Sequence[Call], kept: Sequence[int], lower: LowerElement
) -> Callable[..., list[jax.Array]]:
    """Return a function of what comes from outside: all ops on the ``i``-th elements, with the results ``kept``."""

    def row(*given: jax.Array) -> list[jax.Array]:
        results: list[jax.Array] = []

        def filled(x: Arg) -> Arg:
            return results[x.op] if type(x) is _Inner else given[x.position] if type(x) is _Outer else x

        for node, (args, kwargs) in zip(nodes, calls, strict=True):
            results.append(lower(node, i, [filled(x) for x in args], {k: filled(x) for k, x in kwargs.items()}))
        return [results[k] for k in kept]

    return row
