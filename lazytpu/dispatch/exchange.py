"""Record what processes exchange: the groups that there are, and one function a collective."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from lazytpu.ir.op_schema import Arg, Op, op_of
from lazytpu.ir.rank_patterns import Ranks, is_alone, pattern_of
from lazytpu.ir.tree import trace
from lazytpu.location import site
from lazytpu.tensors.tensor import make
from lazytpu.tracing.cutting import cut, threads
from lazytpu.tracing.record import lock, record
from lazytpu.tracing.transaction import Transaction

Tensor = torch.Tensor
_ops = torch.ops.lazytpu
_ALL_REDUCE, _ALL_GATHER = op_of(_ops.all_reduce.default), op_of(_ops.all_gather.default)
_REDUCE_SCATTER, _ALL_TO_ALL = op_of(_ops.reduce_scatter.default), op_of(_ops.all_to_all.default)
_BROADCAST, _SCATTER = op_of(_ops.broadcast.default), op_of(_ops.scatter.default)


@dataclass(frozen=True, slots=True)
class Group:
    """Processes that exchange data.

    Attributes:
        ranks: of its members in the whole world, in its order.
        place: of this process in it.
        pattern: what stands for it in a graph.
        on_host: gathers a list of numbers of each member, without the device.
    """

    ranks: Ranks
    place: int
    pattern: str
    on_host: Callable[[Sequence[int]], list[list[int]]] | None = None

    @property
    def size(self) -> int:
        """How many members it has."""
        return len(self.ranks)


def group_of(
    ranks: Sequence[int], place: int, world: int, on_host: Callable[[Sequence[int]], list[list[int]]] | None = None
) -> Group:
    """Return the group of some ranks."""
    return Group(tuple(ranks), place, pattern_of(ranks, world), on_host)


@dataclass(frozen=True, slots=True)
class Reduction:
    """How values are put together: ``sum``, ``avg``, ``product``, ``min``, ``max``, ``band``, ``bor`` or ``bxor``.

    Attributes:
        name: one of them.
        factor: what each value is multiplied by before they are summed.
    """

    name: str
    factor: float | None = None


def all_reduce(x: Tensor, reduction: Reduction, group: Group) -> Tensor:
    """Return the values of all members put together."""
    if group.size == 1:
        return _scaled(x, reduction)
    return _exchanged(_ALL_REDUCE, [x, reduction.name, reduction.factor], group)


def all_gather(x: Tensor, group: Group) -> Tensor:
    """Return the rows of all members, one after the other."""
    x = x.reshape(x.shape or (1,))
    return _copied(x) if group.size == 1 else _exchanged(_ALL_GATHER, [x], group)


def reduce_scatter(x: Tensor, reduction: Reduction, group: Group) -> Tensor:
    """Return this member's part of the rows, the values of all members put together."""
    x = x.reshape(x.shape or (1,))
    if x.shape[0] % group.size:
        raise ValueError(f"reduce_scatter: {x.shape[0]} rows cannot be split among {group.size} processes")
    if group.size == 1:
        return _scaled(_copied(x), reduction)
    return _exchanged(_REDUCE_SCATTER, [x, reduction.name, reduction.factor], group)


def all_to_all(x: Tensor, group: Group) -> Tensor:
    """Return the parts that all members have for this one, in their order; parts have equal sizes."""
    if x.shape[0] % group.size:
        raise RuntimeError("Tensor's dim 0 does not divide equally across group size")  # as NCCL's group says
    return _copied(x) if group.size == 1 else _exchanged(_ALL_TO_ALL, [x], group)


def all_to_all_in_parts(x: Tensor, out_rows: Sequence[int], in_rows: Sequence[int], group: Group) -> Tensor:
    """Return the parts that all members have for this one, in their order.

    Args:
        x: rows for the members, one after the other.
        out_rows, in_rows: how many come from each member, and go to each.

    Raises:
        ValueError: another member sends other numbers of rows than this one expects.
    """
    every = [list(in_rows)] if group.on_host is None else group.on_host(in_rows)
    expected = [rows[group.place] for rows in every]
    if expected != list(out_rows):
        raise ValueError(f"all_to_all: the other processes send {expected} rows, and this one expects {list(out_rows)}")
    most = max(map(max, every))
    if all(n == most for rows in every for n in rows):
        return all_to_all(x, group)
    parts = [torch.nn.functional.pad(part, [0, 0] * (x.dim() - 1) + [0, most - len(part)]) for part in x.split(in_rows)]
    padded = torch.cat(parts)
    cut("all_to_all")  # what comes before and behind it has other sizes on the other processes
    found = all_to_all(padded, group).unflatten(0, (group.size, most))
    cut("all_to_all")
    return torch.cat([part[:n] for part, n in zip(found, out_rows, strict=True)])


def broadcast(x: Tensor, source: int, group: Group) -> Tensor:
    """Return what the member at place ``source`` has."""
    if group.size == 1:
        return x.clone()
    if not alike:
        _cut_once("broadcast")
    return _exchanged(_BROADCAST, [x, source], group)


def scatter(x: Tensor, source: int, group: Group) -> Tensor:
    """Return this member's part of the rows that the member at place ``source`` has."""
    if group.size == 1:
        return _copied(x)
    cut("scatter")  # what comes before and behind it differs between the source and the others
    found = _exchanged(_SCATTER, [x, source], group)
    cut("scatter")
    return found


def settle() -> None:
    """Start what is recorded, if it holds collectives: this process is about to wait for others on the host.

    They may wait for its part of these collectives, and come to the host's only afterwards.
    """
    if trace.exchanges and not _is_apart(threading.current_thread()):
        cut("collective on the host")


def _is_apart(thread: threading.Thread) -> bool:
    """Return whether others do the recording: it is not the main thread, nor one of autograd, and has never cut.

    A checkpoint is saved by such a thread.  Nothing waits for it, and where it would cut is another place on each rank.
    """
    known = thread is threading.main_thread() or isinstance(thread, threading._DummyThread)
    return not known and thread.ident not in threads


def _copied(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _scaled(x: Tensor, reduction: Reduction) -> Tensor:
    return x.clone() if reduction.factor is None else x * reduction.factor


alike: list[bool] = []
"""Not empty where all members are known to have done the same before a collective."""
_seen: set[object] = set()


def _cut_once(reason: str) -> None:
    """Cut at a line's first collective of a kind: what members did before it may differ, as where one loads a file."""
    where = reason, site.line_here()
    if where not in _seen:
        _seen.add(where)
        cut(reason)


def _exchanged(op: Op, bound: Sequence[Arg], group: Group) -> Tensor:
    """Record a collective, which runs whether or not this process needs its result."""
    alone = is_alone(group.pattern)
    if alone:  # the other processes record something else
        cut("collective")
    with lock:
        transaction = Transaction()
        while transaction.open():
            node = record(op, [*bound, group.pattern])
            trace.exchanges.append(node)
            made = transaction.write_new(node.values)
    found = make(made[node.value])
    if alone:
        cut("collective")
    return found
