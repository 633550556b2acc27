"""Writing to storages, all at once or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from lazytpu.config import config
from lazytpu.ir.op_schema import aten, op_of
from lazytpu.ir.tree import Value, trace
from lazytpu.observers import calls_of
from lazytpu.tensors.layout import layout_of
from lazytpu.tensors.storage import Alias, Cell, Storage, commit, new_storage, resolve, storage_of
from lazytpu.tracing.cutting import cut
from lazytpu.tracing.record import load, lock, record
from lazytpu.tracing.views import written_at

_op_recorded = calls_of("op_recorded")
_EXPAND = op_of(aten.expand.default)
_TO_COPY = op_of(aten._to_copy.default)


def cut_if_oversized() -> None:
    """Cut a graph that has grown past ``config.max_graph_ops``.

    Called before an op is recorded, where nobody holds values that a cut would make stale.
    """
    if trace.cursor.depth >= config.max_graph_ops:
        cut("max_graph_ops")


class Transaction:
    """Makes values the contents of cells, all of them at once.  Used under `lock`.

    A finalizer or a signal handler that reads a tensor cuts the graph in the middle of whatever runs, and values from
    before the cut mean nothing after it.  So what records them stands in a loop, which runs again then::

        with lock:
            transaction = Transaction()
            while transaction.open():
                transaction.write(cell, record(op, bound).value)

    Attributes:
        held: the cells whose values are what they held, changed in some elements: where such a cell reaches memory
            more than once, only what changed is written.
    """

    __slots__ = ("_before", "_contents", "_old", "_step", "held")

    def __init__(self, held: Sequence[Cell] = ()) -> None:
        self.held = held
        self._step = 0
        self._contents: dict[Storage, Value] = {}
        self._before: dict[Storage, Value] = {}
        self._old: dict[Cell, Value] = {}

    def open(self) -> bool:
        """Commit what was written since the last call; return whether it has (still, or again) to be recorded."""
        step = self._step
        if not step:
            cut_if_oversized()
        elif commit(self._contents, step, self._before):
            for call in _op_recorded:
                call()
            return False
        self._step = step = trace.step
        self._contents = {}
        if self.held:
            self._before = {s: s.value if s.step == step else load(s) for s in map(storage_of, self.held)}
            self._old = {c: load(c) for c in self.held if type(c) is Alias and c.layout.overlapping}
        return True

    def write(self, cell: Cell, value: Value) -> None:
        """Make a value, of the cell's own layout, what the cell holds."""
        storage = storage_of(cell)
        if cell is not storage:
            root, old = self._contents.get(storage), self._old.get(cell) if self._old else None
            value = written_at(storage, resolve(cell)[1], value, root, old)
        self._contents[storage] = value

    def write_all(self, cells: Iterable[Cell], values: Iterable[Value | None]) -> None:
        """Write each value that there is to its cell."""
        for cell, value in zip(cells, values, strict=False):
            if value is not None:
                self.write(cell, value)

    def write_new(self, values: Iterable[Value | None]) -> dict[Value, Storage]:
        """Write each value that there is to a new storage; return them by value."""
        made = {value: new_storage(layout_of(value.layout)) for value in values if value is not None}
        self._contents.update((storage, value) for value, storage in made.items())
        return made


def write_cast(cell: Cell, source: Cell) -> None:
    """Copy what one cell holds into another, with torch's broadcasting and casts."""
    with lock:
        transaction = Transaction()
        while transaction.open():
            layout, value = cell.layout, load(source)
            if value.layout.size != layout.size:
                check_broadcast(value.layout.size, layout.size)
                value = record(_EXPAND, [value, list(layout.size)]).value
            if value.layout.dtype != layout.dtype or value.layout.stride != layout.stride:
                value = record(_TO_COPY, [value, layout.dtype], layouts=(layout,)).value
            transaction.write(cell, value)


def check_broadcast(size: Sequence[int], target: Sequence[int]) -> None:
    """Raise torch's error where a tensor of ``size`` cannot be copied into one of ``target``."""
    torch.empty(target, device="meta").copy_(torch.empty(size, device="meta"))
