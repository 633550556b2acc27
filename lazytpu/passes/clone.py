"""Clone the nodes of a graph with other operands."""

from __future__ import annotations

from collections.abc import Callable

from lazytpu.ir.tree import Node, Number, Value


def replaced(x: object, replace: Callable[[Value | Number], object]) -> object:
    """Return an argument of a node with ``replace`` applied to each operand in it."""
    if type(x) is Value or type(x) is Number:
        return replace(x)
    if isinstance(x, (list, tuple)):
        return type(x)([replaced(e, replace) for e in x])
    return x


def cloned(node: Node, args: tuple[object, ...], kwargs: dict[str, object], *, results: bool) -> Node:
    """Return a node with other arguments.

    Args:
        results: whether it stays on its path and its results stay the values they are; else it gets values of its own.
    """
    made = Node(None)
    made.op, made.key, made.site, made.natural = node.op, node.key, node.site, node.natural
    made.args, made.kwargs = args, kwargs
    if results:
        made.parent, made.depth, made.counts = node.parent, node.depth, node.counts
        made.value, made.layout, made.values, made.structure = node.value, node.layout, node.values, node.structure
    else:
        made.set_results(tuple([None if v is None else v.layout for v in node.values]), node.structure)
    return made
