"""Storages and cells: what tensors that alias each other share.

A *cell* is what a tensor holds: a `Storage`, or an `Alias` (a view of one).  ``cell.step`` equals the
current step only for a storage whose ``value`` may be used as it is; everything else is loaded first
(tracing/record.py).  Mutation is pointing a storage at a new value.
"""

from __future__ import annotations

import gc
from typing import cast

import torch

from lazytpu.ir.sharding import Sharding
from lazytpu.ir.site import Site
from lazytpu.ir.tree import Value, trace
from lazytpu.runtime.client import Buffer
from lazytpu.tensors.layout import Layout

NOTHING = cast(Value, None)
"""What a storage holds in a step in which it was neither read nor written."""


class Storage:
    """The state of one C++ storage, kept as an attribute of its Python object.

    Attributes:
        value: what it holds in step ``step``; meaningless in any other step.
        layout: the root layout.
        buffer: the jax array it held when the step began, None before it was first written.
        shared: another storage or foreign code may hold ``buffer``, so it is never donated.
        dirty: the last step that wrote it, in which it is among ``trace.pending``.
        reads: layouts of views to their values, valid in step ``reads_step`` while the storage holds ``reads_root``, a
            value that another step may have too.
        moved: (storage, layout) when `resize_` put the contents elsewhere.
        host: CPU memory that holds the contents until a tensor gives them a type (saving.py).
        address: what ``data_ptr`` says, once it was asked.
        origin: the line that moved the contents here from the host.
        sharding: how the contents lie on a mesh; None on one device, and where every device of a mesh has all of them
            without anybody having asked for it.
        freed: `resize_` to no bytes has dropped the contents, until it is resized again.
        computed_on_host: an op that has to run on the CPU made the contents there.
    """

    # Defaults of the class, and no __slots__, because making one is in the hot path: what is not set there
    # costs nothing, and CPython reads such attributes as fast as slots.
    value: Value = NOTHING
    step: int = 0
    dirty: int = 0
    layout: Layout
    buffer: Buffer | None = None
    shared: bool = False
    reads: dict[Layout, Value] | None = None
    reads_root: Value | None = None
    reads_step: int = 0
    moved: tuple[Storage, Layout] | None = None
    host: torch.UntypedStorage | None = None
    address: int = 0
    origin: Site | None = None
    computed_on_host: bool = False
    freed: bool = False
    sharding: Sharding | None = None


class Alias:
    """A view of a storage, as one tensor holds it."""

    __slots__ = ("layout", "storage")
    step = 0  # never current, so a view is always loaded

    def __init__(self, storage: Storage, layout: Layout) -> None:
        self.storage, self.layout = storage, layout


Cell = Storage | Alias


def new_storage(layout: Layout, buffer: Buffer | None = None) -> Storage:
    """Return a storage that holds ``buffer``, or nothing yet."""
    storage = Storage()
    storage.layout, storage.buffer = layout, buffer
    return storage


def resolve(cell: Cell) -> tuple[Storage, Layout]:
    """Return the storage that really holds a cell's contents, and the cell's layout in it."""
    storage, layout = (cell.storage, cell.layout) if isinstance(cell, Alias) else (cell, cell.layout)
    while storage.moved is not None:
        target, root = storage.moved
        layout = root if layout is storage.layout else target.layout.child_at(layout.geometry)
        storage = target
    return storage, layout


def storage_of(cell: Cell) -> Storage:
    """Return the storage that really holds a cell's contents."""
    storage = cell.storage if isinstance(cell, Alias) else cell
    return storage if storage.moved is None else resolve(storage)[0]


def cell_at(storage: Storage, layout: Layout) -> Cell:
    """Return the cell of a tensor that lies in ``storage`` as ``layout``."""
    return storage if layout is storage.layout else Alias(storage, layout)


def commit(contents: dict[Storage, Value], step: int, held: dict[Storage, Value] | None = None) -> bool:
    """Make values of step ``step`` the contents of whole storages: of all or, where the step is over, of none.

    Args:
        held: what storages held when the values were computed from it; where another thread has written since,
            nothing is written either.
    """
    for storage in contents:
        if storage.dirty != step:
            storage.dirty = step
            trace.pending.append(storage)
    collecting = gc.isenabled()
    try:
        gc.disable()  # it would run finalizers, which may cut
        if trace.step != step or held and any(s.step != step or s.value is not v for s, v in held.items()):
            return False
        for storage, value in contents.items():
            storage.value = value
            storage.step = step
        return True
    finally:
        if collecting:
            gc.enable()


def write_buffer(storage: Storage, buffer: Buffer | None, shared: bool = False) -> None:
    """Replace the contents by an array that is there already; nothing is recorded."""
    storage.buffer, storage.shared = buffer, shared
    storage.value, storage.step, storage.reads, storage.reads_root = NOTHING, 0, None, None
