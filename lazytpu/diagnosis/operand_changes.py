"""What an op takes, compared through the views that were recorded for it alone.

A view is recorded by the op that reads it, just before that op.  Where paths part at a view, the difference lies in the
op: it reads one tensor fewer, so that its other inputs have other numbers, or the same tensor laid out otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lazytpu.ir.tree import Node, Value, operands


@dataclass(frozen=True, slots=True)
class Otherwise:
    """One tensor that an op takes otherwise than before; `None` where it takes none.

    Attributes:
        node, other: the op on the two paths.
        argument: name of the argument.
        new, old: what it takes.
    """

    node: Node
    other: Node
    argument: str
    new: Value | None
    old: Value | None


def taken_otherwise(node: Node, other: Node) -> Otherwise | None:
    """The one tensor that the op for which a node was recorded takes otherwise than that of another node.

    Args:
        node, other: where two paths part.

    Returns:
        None where the ops come from two places, or differ in other things.
    """
    new, old = _reader(node), _reader(other)
    if new is None or old is None or new.site != old.site:
        return None
    likeness = _Likeness(node)
    if new.op is not old.op:
        return _one_more_or_fewer(new, old, likeness)
    for position, (x, y) in enumerate(zip(new.key[1:], old.key[1:], strict=True)):
        pairs = list(zip(x, y, strict=False)) if type(x) is type(y) is tuple else [(x, y)]
        for a, b in pairs:
            if isinstance(a, Value) and isinstance(b, Value):
                if not likeness.alike(a, b):
                    return Otherwise(new, old, new.op.arguments[position].name, a, b)
            elif a is not b and a != b:
                return None
    return None


def is_view(node: Node) -> bool:
    """Whether a node is a view, recorded for what reads it."""
    recorded = getattr(node.op, "recorded", None)  # loops and conditions are of another class
    return bool(getattr(recorded, "is_view", False))


def base_of(value: Value) -> Value:
    """What a value is a view of; itself where it is none."""
    while value.node is not None and is_view(value.node):
        value = next(x for x in operands(value.node) if type(x) is Value)
    return value


def _reader(node: Node) -> Node | None:
    """The first op from a node on that is no view, along the newest path."""
    while is_view(node):
        if not node.children:
            return None
        node = next(reversed(node.children.values()))
    return node


def _tensors(node: Node) -> Iterator[tuple[str, Value]]:
    """The tensors that an op takes, with the names of their arguments."""
    for argument, x in zip(node.op.arguments, node.key[1:], strict=False):
        for value in x if isinstance(x, tuple) else (x,):
            if isinstance(value, Value):
                yield argument.name, value


def _one_more_or_fewer(new: Node, old: Node, likeness: _Likeness) -> Otherwise | None:
    """The only tensor that one of two ops takes beside those of the other."""
    ours, theirs = list(_tensors(new)), list(_tensors(old))
    if abs(len(ours) - len(theirs)) != 1:
        return None
    fewer = len(ours) < len(theirs)
    short, long = (ours, theirs) if fewer else (theirs, ours)
    for left_out in range(len(long)):
        rest = long[:left_out] + long[left_out + 1 :]
        if all(likeness.alike(x, y) for (_, x), (_, y) in zip(short, rest, strict=True)):
            name, value = long[left_out]
            return Otherwise(new, old, name, None if fewer else value, value if fewer else None)
    return None


class _Likeness:
    """Whether values of two paths are the same thing, up to the numbers that inputs have since the paths parted."""

    def __init__(self, parting: Node) -> None:
        assert parting.parent is not None
        common = parting.parent.path()
        inputs = [x.index for n in common for x in operands(n) if type(x) is Value and x.node is None]
        self._inputs = max(inputs, default=-1) + 1
        self._depth = len(common)

    def alike(self, a: Value, b: Value) -> bool:
        if a is b:
            return True
        if a.layout is not b.layout and not a.layout.same_as(b.layout):
            return False
        if a.node is None or b.node is None:
            return a.node is b.node and min(a.index, b.index) >= self._inputs
        if min(a.node.depth, b.node.depth) <= self._depth or a.node.op is not b.node.op or a.index != b.index:
            return False
        pairs = zip(a.node.key[1:], b.node.key[1:], strict=True)
        return all(self._alike_arguments(x, y) for x, y in pairs)

    def _alike_arguments(self, x: Any, y: Any) -> bool:
        if isinstance(x, Value) and isinstance(y, Value):
            return self.alike(x, y)
        return bool(x is y or x == y)
