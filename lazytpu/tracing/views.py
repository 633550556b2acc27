"""Writing through views: the inverse of each view op, and of chains of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lazytpu.ir.op_schema import OpOverload, aten, op_of
from lazytpu.ir.tree import Value, trace
from lazytpu.ir.types import memory_order, overlaps
from lazytpu.tensors.layout import CONJ, NEG, Layout, root_layout
from lazytpu.tensors.storage import Storage
from lazytpu.tracing.record import load, read_view, record


def written_at(storage: Storage, layout: Layout, value: Value, root: Value | None, old: Value | None) -> Value:
    """Return the new value of a storage that holds ``root`` after ``value`` was written at ``layout``.

    Args:
        root: None for what the storage holds now.
        old: what lay at an overlapping ``layout``, where only what changed is to be written.
    """
    if layout is storage.layout:
        return value
    if root is None:
        root = load(storage)
    if 0 in layout.size:
        return root
    current = storage.reads_root is root and storage.reads_step == trace.step
    known = storage.reads if storage.reads is not None and current else {}
    write = _Write(root, known)
    written = write.overlapping(layout, value, old) if layout.overlapping else write.chain(layout, value)
    readable = not layout.overlapping and value.layout.stride == layout.stride
    storage.reads, storage.reads_root, storage.reads_step = {layout: value} if readable else {}, written, trace.step
    return written


class _Write:
    """One write through a view.

    Attributes:
        root: what the storage holds.
        known: layouts to their values in ``root``, for those that were read.
    """

    __slots__ = ("known", "root")

    def __init__(self, root: Value, known: dict[Layout, Value]) -> None:
        self.root, self.known = root, known

    def chain(self, layout: Layout, value: Value) -> Value:
        """Return the new root after ``value`` was written at ``layout``."""
        parent = layout.parent
        if parent is None:
            return value
        inverse = _INVERSE.get(_name(parent, layout))
        if inverse is None:
            return self.scatter(layout, value)
        return self.chain(parent, inverse(lambda: self.read(parent), parent, layout, value))

    def read(self, layout: Layout) -> Value:
        return read_view(self.root, layout, self.known)

    def memory(self, dtype: torch.dtype) -> Layout:
        """Return the whole storage as a vector of ``dtype``."""
        whole = self.whole()
        flat = whole.flat()
        numel = flat.size[0] * flat.dtype.itemsize // dtype.itemsize
        return whole.child_at(((numel,), (1,), 0, dtype, 0))

    def whole(self) -> Layout:
        """Return the layout of the storage, which may hold the value of another one's view since a copy from that."""
        held = self.root.layout
        return root_layout(held.size, held.stride, held.dtype)

    def scatter(self, layout: Layout, value: Value) -> Value:
        """Put ``value`` at the view's indices in memory, the general rule (of `unfold`); return the new root."""
        memory = self.memory(layout.dtype)
        place = list(layout.size), list(layout.stride), layout.offset
        return self.from_memory(memory, _record(_AS_STRIDED, memory, self.read(memory), value, *place))

    def from_memory(self, memory: Layout, value: Value) -> Value:
        """Return the root whose memory is the vector ``value``.

        Not by `chain`: the layout of that vector may have been made by a view that is itself written by `scatter`.
        """
        whole = self.whole()
        flat = whole.flat()
        if memory.dtype != flat.dtype:
            length = memory.nbytes // flat.dtype.itemsize
            value = _record(_VIEW_DTYPE, whole.child_at(((length,), (1,), 0, flat.dtype, 0)), value, flat.dtype)
            if length != flat.size[0]:
                value = _record(_AS_STRIDED, flat, self.read(flat), value, [length], [1], 0)
        order = range(len(whole.size)) if whole.contiguous else memory_order(whole)
        size = tuple(whole.size[d] for d in order)
        if size != flat.size:
            ordered = whole.child_at((size, tuple(whole.stride[d] for d in order), 0, whole.dtype, 0))
            value = _record(_VIEW, ordered, value, list(size))
        if whole.contiguous:
            return value
        return _record(_PERMUTE, whole, value, [order.index(d) for d in range(len(order))])

    def overlapping(self, layout: Layout, value: Value, old: Value | None) -> Value:
        """Do as `chain` where elements share memory: what a parent holds besides must not be written with it."""
        stored = self.whole().child_at((*layout.geometry[:4], 0))
        for bit, op in ((CONJ, _CONJ), (NEG, _NEG)):
            if layout.bits & bit:
                value = _record(op, stored, value)
                old = None if old is None else _record(op, stored, old)
        if old is None or not overlaps(layout.size, layout.stride):
            return self.scatter(stored, value)
        memory = self.memory(layout.dtype)
        (numel,) = memory.size
        positions = record(_ARANGE, [numel, torch.int64]).value
        positions = record(_STRIDED, [positions, list(layout.size), list(layout.stride), layout.offset]).value
        same = record(_EQ, [value, old]).value
        positions = record(_MASKED_FILL, [positions, same, numel]).value  # past the end, where it is cut off again
        longer = record(_PAD, [self.read(memory), [0, 1]]).value
        longer = record(_INDEX_PUT, [longer, [positions], value]).value
        return self.from_memory(memory, _record(_SHORTER, memory, longer, 0, 0, numel))


def _name(parent: Layout, layout: Layout) -> str:
    if isinstance(layout.op, str):
        return layout.op
    name: str = layout.op.overload._schema.name.removeprefix("aten::")
    return "view_dtype" if name == "view" and layout.dtype != parent.dtype else name


Inverse = Callable[[Callable[[], Value], Layout, Layout, Value], Value]

_ARANGE = op_of(aten.arange.default)
_STRIDED = op_of(aten.as_strided.default)
_EQ = op_of(aten.eq.Tensor)
_MASKED_FILL = op_of(aten.masked_fill.Scalar)
_PAD = op_of(aten.constant_pad_nd.default)
_INDEX_PUT = op_of(aten.index_put.default)
_SHORTER = op_of(aten.slice.Tensor)

_PERMUTE = op_of(aten.permute.default)
_VIEW = op_of(aten.view.default)
_VIEW_DTYPE = op_of(aten.view.dtype)
_TRANSPOSE = op_of(aten.transpose.int)
_AS_STRIDED = op_of(aten.as_strided_scatter.default)
_CONJ = op_of(aten._conj.default)
_NEG = op_of(aten.neg.default)


def _record(op: Any, parent: Layout, *args: Any) -> Value:
    """Record a node whose result is the parent again; return its value."""
    found: Value = record(op, list(args), layouts=(parent,)).value
    return found


def _undone(overload: OpOverload, arguments: Callable[[Layout, Layout], tuple[Any, ...]] = lambda *_: ()) -> Inverse:
    """Return the inverse by one op of the value, with ``arguments(parent, layout)``."""
    op = op_of(overload)
    return lambda above, parent, layout, value: _record(op, parent, value, *arguments(parent, layout))


def _scattered(overload: OpOverload) -> Inverse:
    """Return the inverse by an op that puts the value into the parent's."""
    op = op_of(overload)
    return lambda above, parent, layout, value: _record(op, parent, above(), value, *layout.args)


def _permute(above: Callable[[], Value], parent: Layout, layout: Layout, value: Value) -> Value:
    dims = [d % len(parent.size) for d in layout.args[0]]
    return _record(_PERMUTE, parent, value, [dims.index(d) for d in range(len(dims))])


def _t(above: Callable[[], Value], parent: Layout, layout: Layout, value: Value) -> Value:
    return value if len(parent.size) < 2 else _record(_TRANSPOSE, parent, value, 0, 1)


_RESHAPING = ("view", "_unsafe_view", "_reshape_alias", "unsqueeze", "squeeze", "expand")
_INVERSE: dict[str, Inverse] = {
    **dict.fromkeys(_RESHAPING, _undone(aten.view.default, lambda parent, layout: (list(parent.size),))),
    **dict.fromkeys(("alias", "detach"), lambda above, parent, layout, value: value),
    "permute": _permute,
    "transpose": _undone(aten.transpose.int, lambda parent, layout: layout.args),
    "t": _t,
    "select": _scattered(aten.select_scatter.default),
    "slice": _scattered(aten.slice_scatter.default),
    "diagonal": _scattered(aten.diagonal_scatter.default),
    "as_strided": _scattered(aten.as_strided_scatter.default),
    "view_dtype": _undone(aten.view.dtype, lambda parent, layout: (parent.dtype,)),
    "view_as_real": _undone(aten.view_as_complex.default),
    "view_as_complex": _undone(aten.view_as_real.default),
    "_conj": _undone(aten._conj.default),
    "_neg_view": _undone(aten.neg.default),
}
