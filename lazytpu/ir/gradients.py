"""From a node of autograd to the op whose gradient it computes: the site of an op of the backward pass.

Autograd numbers its nodes in the order their ops are called.  Where an op is recorded for the first time its number is
noted with its site.  In later steps the same ops have other numbers and nobody looks; a gradient that is recorded for
the first time then (because gradients are added up, say) finds them by the shape of autograd's graph: it is the same.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from typing import Any

import torch

_MAX_OPS = 65536
_MAX_GRAPHS = 32

_sites: OrderedDict[int, Any] = OrderedDict()  # number to site
_graphs: deque[dict[int, str]] = deque(maxlen=_MAX_GRAPHS)  # number to name, of backward passes whose ops were noted
_MAX_TRIES = 8  # in one backward pass


class _Ours(threading.local):
    """What a thread knows.

    Attributes:
        newest: the last number noted.
        task: the latest backward pass.
        noted: an op of it was noted in this step.
        offset: what to add to its numbers, see `_offset`; ``tries`` to find it were made.
    """

    newest = task = -1
    noted, offset, tries = False, 0, 0


_ours = _Ours()


def note(site: Any) -> None:
    """Notes the site of the op for which autograd has just made a node: its number is that of the newest one.

    An op without a gradient finds the number that the op before it has left, which is that op's.
    """
    number = torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]
    if _ours.newest == number:
        return
    _ours.newest = number
    _sites[number] = site
    if len(_sites) > _MAX_OPS:
        _sites.popitem(last=False)


def adds_up(node: Any) -> bool:
    """Whether a node of autograd adds a gradient to the one that its tensor has."""
    return node is not None and type(node).__name__ == "AccumulateGrad"


def forward_of(node: Any) -> Any:
    """The site of the op whose gradient a node computes; None where it is not known."""
    number = _number(node)
    if number is None:
        return None
    if _ours.task != torch._C._current_graph_task_id():
        _ours.task, _ours.offset, _ours.noted, _ours.tries = torch._C._current_graph_task_id(), 0, False, 0
    found = _sites.get(number)
    if found is not None:
        if not _ours.noted:
            _ours.noted = True
            _graphs.append(_below(node))
        return found
    if not _ours.offset and _ours.tries < _MAX_TRIES:
        _ours.tries += 1
        _ours.offset = _offset(number, _below(node))
    return _sites.get(number + _ours.offset)


def is_known() -> bool:
    """Whether the ops of the backward pass that runs here are known: what is not was recorded as no op, like a view."""
    return _ours.task == torch._C._current_graph_task_id() and bool(_ours.noted or _ours.offset)


def _number(node: Any) -> int | None:
    if node is None or adds_up(node):
        return None
    try:
        return int(node._sequence_nr())
    except AttributeError:  # of a Python function
        return None


def _offset(number: int, below: dict[int, str]) -> int:
    """What to add to the numbers of this backward pass for those under which the same ops were noted; 0 if unknown."""
    name = below[number]
    for graph in reversed(_graphs):
        for other in sorted(graph):
            offset = other - number
            fits = graph[other] == name and other in _sites
            if fits and all(graph.get(n + offset) == its for n, its in below.items()):
                return offset
    return 0


def _below(node: Any) -> dict[int, str]:
    """The numbers and names of the nodes that a node's gradients go to, and its own."""
    found: dict[int, str] = {}
    seen, waiting = set(), [node]
    while waiting:
        at = waiting.pop()
        number = _number(at)
        if number is not None:
            found[number] = type(at).__name__  # `name` may be an attribute of a Python function
        for following, _ in at.next_functions:
            if following is not None and not adds_up(following) and following not in seen:
                seen.add(following)
                waiting.append(following)
    return found
