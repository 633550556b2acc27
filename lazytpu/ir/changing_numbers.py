"""Numbers of the trace tree that are attributes until they are seen to change: then they are inputs of the graph."""

from __future__ import annotations

from collections.abc import Sequence

from lazytpu.ir.op_schema import Op
from lazytpu.ir.tree import Node

_ASIDE = object()  # begins a key that no op has


def type_of_number(key: object) -> type | None:
    """Return ``int`` or ``float`` for the part of a key that stands for a number, or for the type of one, else None."""
    if isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], type):  # a `Scalar` that is an attribute
        key = key[1]
    kind = key if isinstance(key, type) else type(key)
    return kind if kind in (int, float) else None


def remember(parent: Node, op: Op, changed: Sequence[int]) -> tuple[int, ...]:
    """Note that numbers at these positions change in an op after ``parent``; return all that do."""
    known = parent.dynamic or {}
    positions = tuple(sorted({*known.get(op, ()), *changed}))
    parent.dynamic = {**known, op: positions}
    return positions


def set_aside(node: Node) -> None:
    """Keep the node of a number that is seen to change out of reach: other numbers and this one take the same program.

    Explanations still find it beside the node that takes the number as an input.
    """
    assert node.parent is not None
    siblings = node.parent.children
    if siblings.get(node.key) is node:
        del siblings[node.key]
        siblings[_ASIDE, node.key] = node


def make_inputs(node: Node, changed: Sequence[int]) -> None:
    """Let numbers of an op be inputs from the next step on; nothing where the op is not in the tree as it stands."""
    if changed and node.parent is not None and node.parent.children.get(node.key) is node:
        set_aside(node)
        remember(node.parent, node.op, changed)
