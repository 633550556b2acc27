"""From a node of autograd to the op whose gradient it computes: the site of an op of the backward pass.

Autograd numbers its nodes in the order their ops are called, on each thread from 0.  Where an op is recorded for the
first time its number is noted with its site.  In later steps the same ops have other numbers and nobody looks; a
gradient that is recorded for the first time then (because gradients are added up, say) finds them by the shape of
autograd's graph: it is the same.

A graph for gradients of gradients holds nodes of the main thread and of the one that runs backward passes, whose
numbers coincide.  There what was noted has to fit the graph (twice.py); where it does not, the site is not known.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import torch

from lazytpu.location.sequence_numbers import Labels, Noted, Table

_MAX_OPS = 65536
_MAX_GRAPHS = 32
_MAX_TABLES = 8

_tables: deque[Table] = deque(maxlen=_MAX_TABLES)  # one for each thread that has recorded ops with gradients
_graphs: deque[tuple[Table, dict[int, str]]] = deque(maxlen=_MAX_GRAPHS)  # number to name, of passes with noted ops
_MAX_TRIES = 8  # in one backward pass


class _Ours(threading.local):
    """What a thread knows.

    Attributes:
        table: what was noted here, None before.
        newest: the last number noted.
        task: the latest backward pass.
        noted: an op of it was noted in this step.
        offset: what to add to its numbers, see `_offset`; ``tries`` to find it were made.
        labels: where several threads have noted ops, what fits the graph of this pass.
        like: and the table that ``offset`` leads to, where nothing fits.
    """

    table: Table | None = None
    newest = task = -1
    noted, offset, tries = False, 0, 0
    labels: Labels | None = None
    like: Table | None = None


_ours = _Ours()


def note(site: Any, op: str, backward: bool) -> None:
    """Notes the site of the op for which autograd has just made a node: its number is that of the newest one.

    An op without a gradient finds the number that the op before it has left, which is that op's.

    Args:
        op: its name.
        backward: a backward pass records it, for gradients of gradients.
    """
    number = torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]
    if _ours.newest == number:
        return
    _ours.newest = number
    if _ours.table is None:
        _ours.table = Table()
        _tables.append(_ours.table)
    _ours.table.note(number, Noted(site, op, backward), _MAX_OPS)


def adds_up(node: Any) -> bool:
    """Whether a node of autograd adds a gradient to the one that its tensor has."""
    return node is not None and type(node).__name__ == "AccumulateGrad"


def forward_of(node: Any) -> Any:
    """The site of the op whose gradient a node computes; None where it is not known."""
    number = number_of(node)
    if number is None or not _tables:
        return None
    if _ours.task != torch._C._current_graph_task_id():
        _ours.task, _ours.offset, _ours.noted, _ours.tries = torch._C._current_graph_task_id(), 0, False, 0
        _ours.labels = _ours.like = None
    return _alone(node, number, _tables[0]) if len(_tables) == 1 else _among_several(node)


def is_known() -> bool:
    """Whether the ops of the backward pass that runs here are known: what is not was recorded as no op, like a view."""
    return _ours.task == torch._C._current_graph_task_id() and bool(_ours.noted or _ours.offset)


def _alone(node: Any, number: int, table: Table) -> Any:
    """The site where all ops with gradients were recorded by one thread."""
    found = table.get(number)
    if found is not None:
        if not _ours.noted:
            _ours.noted = True
            _graphs.append((table, _below(node)))
        return found.site
    if not _ours.offset and _ours.tries < _MAX_TRIES:
        _ours.tries += 1
        _ours.offset = _offset(number, _below(node), table)
    found = table.get(number + _ours.offset)
    return None if found is None else found.site


def _among_several(node: Any) -> Any:
    labels = _ours.labels
    if labels is None or not labels.knows(node) and _ours.tries < _MAX_TRIES:
        _ours.tries += 1
        labels = _ours.labels = Labels(node, _tables, labels)
    if labels.of_one is not None:
        return _alone(node, number_of(node) or 0, labels.of_one)
    found = labels.of(node) or _of_like_graph(node, number_of(node) or 0)
    return None if found is None else found.site


def _of_like_graph(node: Any, number: int) -> Noted | None:
    """What was noted, by any thread, in a backward pass through the same ops."""
    if not _ours.offset and _ours.tries < _MAX_TRIES:
        _ours.tries += 1
        below = _below(node)
        offsets = ((_offset(number, below, table), table) for table in reversed(_tables))
        _ours.offset, _ours.like = next((pair for pair in offsets if pair[0]), (0, None))
    return _ours.like.get(number + _ours.offset) if _ours.like is not None else None


def number_of(node: Any) -> int | None:
    """The number of a node; None for one that belongs to no op."""
    if node is None or adds_up(node):
        return None
    try:
        return int(node._sequence_nr())
    except AttributeError:  # of a Python function
        return None


def _offset(number: int, below: dict[int, str], table: Table) -> int:
    """What to add to the numbers of this backward pass for those under which the same ops were noted; 0 if unknown."""
    name = below[number]
    for noted_in, graph in reversed(_graphs):
        for other in sorted(graph) if noted_in is table else ():
            offset = other - number
            fits = graph[other] == name and other in table
            if fits and all(graph.get(n + offset) == its for n, its in below.items()):
                return offset
    return 0


def _below(node: Any) -> dict[int, str]:
    """The numbers and names of the nodes that a node's gradients go to, and its own."""
    found: dict[int, str] = {}
    seen, waiting = set(), [node]
    while waiting:
        at = waiting.pop()
        number = number_of(at)
        if number is not None:
            found[number] = type(at).__name__  # `name` may be an attribute of a Python function
        for following, _ in at.next_functions:
            if following is not None and not adds_up(following) and following not in seen:
                seen.add(following)
                waiting.append(following)
    return found
