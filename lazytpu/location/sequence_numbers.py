"""Which thread made a node of autograd, where several have noted ops under the same numbers (see gradients.py).

A node is newer than those its gradients go to, and has the name of its op: ``MulBackward0`` is that of ``aten.mul``.
What was noted under its number is its own if both hold, and nothing else that was noted fits as well.
"""

from __future__ import annotations

import itertools
import re
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

_BACKWARD = re.compile(r"Backwards?\d*$")
_tick = itertools.count().__next__

Signature = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Noted:
    """What was noted of an op.

    Attributes:
        site, op: its place in the program and its name.
        backward: a backward pass recorded it.
        tick: counts all that was noted.
    """

    site: Any
    op: str
    backward: bool
    tick: int = field(default_factory=_tick)


class Table:
    """Numbers to what one thread has noted."""

    def __init__(self) -> None:
        self._found: OrderedDict[int, Noted] = OrderedDict()
        self.get = self._found.get

    def note(self, number: int, noted: Noted, limit: int) -> None:
        """Keeps it, and forgets the oldest past ``limit``."""
        self._found[number] = noted
        if len(self._found) > limit:
            self._found.popitem(last=False)

    def __contains__(self, number: int) -> bool:
        return number in self._found


class Labels:
    """What was noted of each node of a graph.  Holds no node, which would keep the tensors that it has saved.

    Attributes:
        of_one: the table of the thread that made all of the graph, where that is known; its numbers are then unique.
    """

    def __init__(self, root: Any, tables: Iterable[Table], before: Labels | None) -> None:
        self._found: dict[Signature, Noted | None] = {} if before is None else dict(before._found)
        self.of_one: Table | None = None
        order = _children_first(root)
        if _numbers_fall(order) and (before is None or before.of_one is not None):
            self.of_one = _best(order, tables)
        for node, label in _labelled(order, tables).items():
            key = _signature(node)
            self._found[key] = label if self._found.get(key, label) is label else None

    def knows(self, node: Any) -> bool:
        """Whether the node was in a graph that was looked at."""
        return _signature(node) in self._found

    def of(self, node: Any) -> Noted | None:
        """What was noted of a node; None where it is not known."""
        return self._found.get(_signature(node))


def _labelled(order: list[Any], tables: Iterable[Table]) -> dict[Any, Noted | None]:
    """What was noted of each node, those first that its gradients go to; None where nothing fits, or too much."""
    labels: dict[Any, Noted | None] = {}
    fitting: dict[Any, list[Noted]] = {}
    for node in order:
        fitting[node] = _fitting(node, labels, tables)
        labels[node] = fitting[node][0] if len(fitting[node]) == 1 else None
    newest: dict[Any, int] = {}  # node to the tick of the first that was made of its result
    for node in reversed(order):
        left = [noted for noted in fitting[node] if noted.tick < newest.get(node, noted.tick + 1)]
        labels[node] = None
        if len(left) == 1:
            labels[node] = left[0]
            for child, _ in node.next_functions:
                newest[child] = min(newest.get(child, left[0].tick), left[0].tick)
    return labels


def _fitting(node: Any, labels: dict[Any, Noted | None], tables: Iterable[Table]) -> list[Noted]:
    number = _number(node)
    if number is None:
        return []
    children = [(labels[c], _number(c)) for c, _ in node.next_functions if c in labels]
    candidates = [table.get(number) for table in tables]
    own = [noted for noted in candidates if noted is not None and _is_of(node, noted.op)]
    return [noted for noted in own if _is_newer(noted, number, children)]


def _is_newer(noted: Noted, number: int, children: list[tuple[Noted | None, int | None]]) -> bool:
    for label, other in children:
        if label is not None and label.tick >= noted.tick:
            return False
        if label is None and not noted.backward and other is not None and other >= number:
            return False  # it would be of another thread, of which nothing is known
    return True


def _is_of(node: Any, op: str) -> bool:
    """Whether a node may be that of an op, by its name: ``SoftmaxBackward0`` and ``aten._softmax.default``."""
    name = _BACKWARD.sub("", type(node).__name__)
    return name.lower() == "".join(op.split(".")[1:2]).replace("_", "").lower()


def _best(order: list[Any], tables: Iterable[Table]) -> Table | None:
    """The table in which most nodes of a graph are found under their names; None if two have as many."""

    def hits(table: Table) -> int:
        found = [(node, table.get(_number(node))) for node in order]
        return sum(noted is not None and _is_of(node, noted.op) for node, noted in found)

    counted = sorted(((hits(table), table) for table in tables), key=lambda pair: -pair[0])
    return counted[0][1] if counted and counted[0][0] > counted[1][0] else None


def _numbers_fall(order: list[Any]) -> bool:
    """Whether each node has a number above those of the nodes its gradients go to, as where one thread made them."""
    for node in order:
        number = _number(node)
        for child, _ in node.next_functions:
            below = _number(child)
            if number is not None and below is not None and below >= number:
                return False
    return True


def _children_first(root: Any) -> list[Any]:
    """The nodes of a graph, each behind those its gradients go to; without those that add gradients up."""
    order: dict[Any, None] = {}
    waiting = [(root, False)]
    seen = {root}
    while waiting:
        node, is_done = waiting.pop()
        if is_done:
            order[node] = None
            continue
        waiting.append((node, True))
        for child, _ in node.next_functions:
            if child is not None and child not in seen and type(child).__name__ != "AccumulateGrad":
                seen.add(child)
                waiting.append((child, False))
    return list(order)


def _signature(node: Any) -> Signature:
    children = [(_number(c), type(c).__name__) for c, _ in node.next_functions if c is not None]
    return _number(node), type(node).__name__, *children


def _number(node: Any) -> Any:
    """The number of a node; None for one that belongs to no op."""
    if node is None or type(node).__name__ == "AccumulateGrad":
        return None
    number = getattr(node, "_sequence_nr", None)
    return None if number is None else int(number())
