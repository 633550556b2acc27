"""Numbers that are attributes until they are seen to change: then they are inputs of the graph.

Scalars are inputs from the start; this is about the others (a dropout rate, the start of a slice), where the
lowering rule says that it takes them as arrays (``dynamic`` in the registry).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lazytpu.ir.changing_numbers import remember, set_aside, type_of_number
from lazytpu.ir.op_schema import ABSENT, Op
from lazytpu.ir.tree import Node, Value, trace
from lazytpu.lowering.registry import dynamic_arguments


def node_with_other_scalars(node: Node) -> tuple[Node | None, tuple[int, ...]]:
    """Return a known node that differs from a new one in nothing, or only in numbers its rule takes as inputs.

    It is a sibling, or, where an earlier number of this step was made dynamic, the node at the same place of
    the path that the step left there (``trace.shadow``), so that all the numbers which change in a step are
    found together.

    Returns:
        The node, if there is one, and the positions of the numbers.
    """
    assert node.parent is not None
    known = trace.shadow.children if trace.shadow is not None else node.parent.children
    for other in known.values():
        if other.op is node.op and _types(other) == _types(node):
            keys = enumerate(zip(node.key[1:], other.key[1:], strict=True))
            changed = [i for i, (x, y) in keys if not _alike(x, y)]
            if not changed and known.get(other.key) is not other:  # set aside by `make_inputs`, say
                changed = [*((other.parent and other.parent.dynamic) or {}).get(node.op, ())]
            if all(_is_number(node, other, i) for i in changed) and (changed or trace.shadow is not None):
                return other, tuple(changed)
    return None, ()


def _types(node: Node) -> list[object]:
    return [None if v is None else (v.layout.size, v.layout.stride, v.layout.dtype) for v in node.values]


def _alike(x: object, y: object) -> bool:
    """Return whether two parts of keys are the same; on the shadow path, values of the same type are."""
    if trace.shadow is not None and type(x) is Value and type(y) is Value:
        return bool(_types_of(x) == _types_of(y))
    if trace.shadow is not None and type(x) is tuple and type(y) is tuple:
        return len(x) == len(y) and all(_alike(p, q) for p, q in zip(x, y, strict=True))
    return x is y or bool(x == y)


def _types_of(value: Value) -> object:
    return value.layout.size, value.layout.stride, value.layout.dtype


def _is_number(node: Node, other: Node, position: int) -> bool:
    kinds = [type_of_number(n.key[position + 1]) for n in (node, other)]
    dynamic = kinds[0] is not None and kinds[0] is kinds[1]
    return dynamic and node.op.arguments[position].name in dynamic_arguments(node.op.recorded)


def key_of(positions: Sequence[int], key: Any, bound: Sequence[Any]) -> Any:
    """Return ``key`` with types in place of the scalars that are inputs."""
    changed = list(key)
    for position in positions:
        changed[position + 1] = type(bound[position]) if position < len(bound) else ABSENT
    return tuple(changed)


def known_node(parent: Node, op: Op, key: Any, bound: Sequence[Any], numbers: list[complex]) -> Node | None:
    """Return the child of ``parent`` that takes the numbers known to change there as inputs; they join ``numbers``."""
    positions = (parent.dynamic or {}).get(op)
    if positions is None:
        return None
    node = parent.children.get(key_of(positions, key, bound))
    if node is not None:
        numbers += [bound[position] for position in positions]
    return node


__all__ = ["key_of", "known_node", "node_with_other_scalars", "remember", "set_aside"]
