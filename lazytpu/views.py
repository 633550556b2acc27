"""Writing through views: the inverse of each view op, and of chains of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lazytpu.ir.layout import Layout
from lazytpu.ir.tree import Value
from lazytpu.record import load, lock, record, view_value
from lazytpu.schema import aten, op_of
from lazytpu.storage import Cell, resolve, write_storage


def write(cell: Cell, value: Value) -> None:
    """Makes ``value``, which has the cell's own layout, the contents of the cell."""
    with lock:
        storage, layout = resolve(cell)
        if layout is storage.layout:
            write_storage(storage, value)
            return
        root = _write_chain(load(storage), layout, value)
        write_storage(storage, root)
        storage.reads, storage.reads_root = {layout: value}, root


def _write_chain(root: Value, layout: Layout, value: Value) -> Value:
    """The new value of ``layout``'s root after ``value`` was written at ``layout``."""
    parent = layout.parent
    if parent is None:
        return value
    inverse = _INVERSE.get(_name(parent, layout))
    if inverse is None:
        return _scatter(root, layout, value)
    return _write_chain(root, parent, inverse(_read_chain(root, parent), parent, layout, value))


def _name(parent: Layout, layout: Layout) -> str:
    if isinstance(layout.op, str):
        return layout.op
    name: str = layout.op.overload._schema.name.removeprefix("aten::")
    return "view_dtype" if name == "view" and layout.dtype != parent.dtype else name


def _scatter(root: Value, layout: Layout, value: Value) -> Value:
    """The general rule: put ``value`` at the view's positions in memory (`unfold`, for one)."""
    flat = root.layout.flat()
    memory = _read_chain(root, flat)
    if layout.dtype != flat.dtype:
        same = root.layout.child_at(((flat.size[0] * flat.dtype.itemsize // layout.dtype.itemsize,), (1,), 0, layout.dtype, 0))
        memory = _read_chain(root, same)
        flat = same
    written = _record(_AS_STRIDED, flat, memory, value, list(layout.size), list(layout.stride), layout.offset)
    return _write_chain(root, flat, written)


def _read_chain(root: Value, layout: Layout) -> Value:
    if layout.parent is None:
        return root
    return view_value(_read_chain(root, layout.parent), layout)


Inverse = Callable[[Value, Layout, Layout, Value], Value]

_VIEW = op_of(aten.view.default)
_PERMUTE = op_of(aten.permute.default)
_TRANSPOSE = op_of(aten.transpose.int)
_VIEW_DTYPE = op_of(aten.view.dtype)
_SELECT = op_of(aten.select_scatter.default)
_SLICE = op_of(aten.slice_scatter.default)
_DIAGONAL = op_of(aten.diagonal_scatter.default)
_AS_STRIDED = op_of(aten.as_strided_scatter.default)
_VIEW_AS_COMPLEX = op_of(aten.view_as_complex.default)
_VIEW_AS_REAL = op_of(aten.view_as_real.default)
_CONJ = op_of(aten._conj.default)
_NEG = op_of(aten.neg.default)
_COMPLEX = op_of(aten.complex.default)
_REAL, _IMAG = op_of(aten.real.default), op_of(aten.imag.default)


def _record(op: Any, parent: Layout, *args: Any) -> Value:
    """A node whose result is the parent again."""
    return record(op, list(args), layouts=(parent,)).value  # type: ignore[no-any-return]


def _reshape(above: Value, parent: Layout, layout: Layout, value: Value) -> Value:
    return _record(_VIEW, parent, value, list(parent.size))


def _permute(above: Value, parent: Layout, layout: Layout, value: Value) -> Value:
    dims = [d % len(parent.size) for d in layout.args[0]]
    return _record(_PERMUTE, parent, value, [dims.index(d) for d in range(len(dims))])


def _transpose(above: Value, parent: Layout, layout: Layout, value: Value) -> Value:
    return _record(_TRANSPOSE, parent, value, layout.args[0], layout.args[1])


def _t(above: Value, parent: Layout, layout: Layout, value: Value) -> Value:
    return value if len(parent.size) < 2 else _record(_TRANSPOSE, parent, value, 0, 1)


def _select(above: Value, parent: Layout, layout: Layout, value: Value) -> Value:
    return _record(_SELECT, parent, above, value, *layout.args)


def _slice(above: Value, parent: Layout, layout: Layout, value: Value) -> Value:
    return _record(_SLICE, parent, above, value, *layout.args)


def _diagonal(above: Value, parent: Layout, layout: Layout, value: Value) -> Value:
    return _record(_DIAGONAL, parent, above, value, *layout.args)


def _as_strided(above: Value, parent: Layout, layout: Layout, value: Value) -> Value:
    return _record(_AS_STRIDED, parent, above, value, *layout.args)


def _split(above: Value, parent: Layout, layout: Layout, value: Value) -> Value:
    """Any of split, split_with_sizes, chunk: the part starts where its offset says."""
    dim = layout.args[1] % len(parent.size) if len(layout.args) > 1 else 0
    start = (layout.offset - parent.offset) // parent.stride[dim] if parent.stride[dim] else 0
    return _record(_SLICE, parent, above, value, dim, start, start + layout.size[dim])


def _unbind(above: Value, parent: Layout, layout: Layout, value: Value) -> Value:
    dim = layout.args[0] if layout.args else 0
    return _record(_SELECT, parent, above, value, dim, layout.index)


def _view_dtype(above: Value, parent: Layout, layout: Layout, value: Value) -> Value:
    return _record(_VIEW_DTYPE, parent, value, parent.dtype)


def _view_as_real(above: Value, parent: Layout, layout: Layout, value: Value) -> Value:
    return _record(_VIEW_AS_COMPLEX, parent, value)


def _view_as_complex(above: Value, parent: Layout, layout: Layout, value: Value) -> Value:
    return _record(_VIEW_AS_REAL, parent, value)


def _conj(above: Value, parent: Layout, layout: Layout, value: Value) -> Value:
    return _record(_CONJ, parent, value)


def _neg_view(above: Value, parent: Layout, layout: Layout, value: Value) -> Value:
    return _record(_NEG, parent, value)


def _same(above: Value, parent: Layout, layout: Layout, value: Value) -> Value:
    return value


_INVERSE: dict[str, Inverse] = {
    "view": _reshape,
    "_unsafe_view": _reshape,
    "_reshape_alias": _reshape,
    "unsqueeze": _reshape,
    "squeeze": _reshape,
    "expand": _reshape,
    "permute": _permute,
    "transpose": _transpose,
    "t": _t,
    "select": _select,
    "slice": _slice,
    "diagonal": _diagonal,
    "as_strided": _as_strided,
    "split": _split,
    "split_with_sizes": _split,
    "chunk": _split,
    "unbind": _unbind,
    "view_dtype": _view_dtype,
    "view_as_real": _view_as_real,
    "view_as_complex": _view_as_complex,
    "_conj": _conj,
    "_neg_view": _neg_view,
    "alias": _same,
    "detach": _same,
}
