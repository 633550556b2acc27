"""From a node of autograd to the op whose gradient it computes: the site of an op of the backward pass.

Autograd numbers its nodes in the order their ops are called, on each thread from 0.  Where an op is recorded for the
first time its number is noted with its site.  In later steps the same ops have other numbers and nobody looks; a
gradient that is recorded for the first time then (because gradients are accumulated, say) finds them by the shape of
autograd's graph: it is the same.

Numbers of several threads coincide, as where gradients have gradients.  There a node is known only if one op alone was
noted in this step under its number and name.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch.autograd.graph import Node

from lazytpu.ir.tree import trace

if TYPE_CHECKING:
    from lazytpu.ir.site import Site

_MAX_OPS = 65536
_MAX_TRIES = 8  # to find an offset, in one backward pass
_BACKWARD = re.compile(r"Backwards?\d*$")


class _Noted(NamedTuple):
    """The site of an op, its name and the step in which it was recorded."""

    site: Site
    op: str
    step: int


_Table = OrderedDict[int, _Noted]

_tables: deque[_Table] = deque(maxlen=8)  # one for each thread that has recorded ops with gradients
_graphs: deque[dict[int, str]] = deque(maxlen=32)  # number to name, of backward passes through noted ops


class _Thread(threading.local):
    """What a thread knows.

    Attributes:
        table: what was noted here, None before.
        newest: the last number noted.
        task: the latest backward pass.
        found: an op of it was found under its own number.
        offset: what to add to its numbers for those under which the same ops were noted.
        tries: how often the offset was looked for.
    """

    table: _Table | None = None
    newest = task = -1
    found, offset, tries = False, 0, 0


_thread = _Thread()


def note(site: Site, op: str) -> None:
    """Note the site of the op for which autograd has just made a node: its number is that of the newest one.

    An op without a gradient finds the number that the op before it has left, which is that op's.
    """
    number = torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]
    if _thread.newest == number:
        return
    _thread.newest = number
    if _thread.table is None:
        _thread.table = OrderedDict()
        _tables.append(_thread.table)
    _thread.table[number] = _Noted(site, op, trace.recorded_step)
    if len(_thread.table) > _MAX_OPS:
        _thread.table.popitem(last=False)


def accumulates(node: Node | None) -> bool:
    """Return whether a node of autograd adds a gradient to the one that its tensor has."""
    return type(node).__name__ == "AccumulateGrad"


def forward_of(node: Node | None) -> Site | None:
    """Find the site of the op whose gradient a node computes; None where it is not known."""
    number = _number_of(node)
    if node is None or number is None or not _tables:
        return None
    if _thread.task != torch._C._current_graph_task_id():
        _thread.task, _thread.offset, _thread.found, _thread.tries = torch._C._current_graph_task_id(), 0, False, 0
    noted = _of_one_thread(node, number, _tables[0]) if len(_tables) == 1 else _of_several(node, number)
    return None if noted is None else noted.site


def is_known() -> bool:
    """Return whether the ops of the backward pass that runs here are known; one that is not was recorded as no op."""
    return _thread.task == torch._C._current_graph_task_id() and bool(_thread.found or _thread.offset)


def _of_one_thread(node: Node, number: int, table: _Table) -> _Noted | None:
    """Look a node up where all ops with gradients were recorded by one thread."""
    if number in table:
        if not _thread.found:
            _thread.found = True
            _graphs.append(_below(node))
        return table[number]
    if not _thread.offset and _thread.tries < _MAX_TRIES:
        _thread.tries += 1
        _thread.offset = _offset(number, _below(node), table)
    return table.get(number + _thread.offset)


def _of_several(node: Node, number: int) -> _Noted | None:
    """Look a node up where threads have noted ops under the same numbers; its name is that of its op."""
    name = _BACKWARD.sub("", type(node).__name__).lower()
    found = [table[number] for table in _tables if number in table]
    fitting = [x for x in found if x.step == trace.recorded_step and _is_of(name, x.op)]
    _thread.found = _thread.found or len(fitting) == 1
    return fitting[0] if len(fitting) == 1 else None


def _is_of(name: str, op: str) -> bool:
    """Return whether a node's name is that of an op: ``softmax`` and ``aten._softmax``."""
    return op.partition(".")[2].partition(".")[0].replace("_", "").lower() == name


def _number_of(node: Node | None) -> int | None:
    """Return the number of a node; None for one that belongs to no op."""
    number = None if accumulates(node) else getattr(node, "_sequence_nr", None)  # a Python function has none
    return None if number is None else int(number())


def _offset(number: int, below: dict[int, str], table: _Table) -> int:
    """Find what to add to the numbers of this backward pass for those of a known one; 0 where none is like it."""
    for graph in reversed(_graphs):
        for other in sorted(graph):
            offset = other - number
            if other in table and all(graph.get(n + offset) == name for n, name in below.items()):
                return offset
    return 0


def _below(node: Node) -> dict[int, str]:
    """Return the numbers and names of the nodes that a node's gradients go to, and its own."""
    found: dict[int, str] = {}
    seen, waiting = {node}, [node]
    while waiting:
        at = waiting.pop()
        number = _number_of(at)
        if number is not None:
            found[number] = type(at).__name__  # `name` may be an attribute of a Python function
        following = {n for n, _ in at.next_functions if n is not None and not accumulates(n)} - seen
        seen |= following
        waiting += following
    return found
