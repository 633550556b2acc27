"""One kernel for each aten overload: what torch's dispatcher calls for a device tensor.

There are four kinds, told apart by the schema: views, functional ops, ops that write (in place or
``out=``), and the few that need the values (`handwritten`).  ``functional`` and ``in_place`` here are the general
forms; `generated` makes quicker ones for the common schemas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import NoReturn

import torch
from torch.autograd.graph import increment_version

from lazytpu.errors import UnsupportedOpError
from lazytpu.ir.op_schema import ABSENT, Arg, Op, OpOverload, aten, op_of
from lazytpu.location import site
from lazytpu.tensors.layout import Geometry, Layout, geometry_of
from lazytpu.tensors.storage import Storage, cell_at, resolve
from lazytpu.tensors.tensor import LazyTensor, MixedDevicesError, make, make_view
from lazytpu.tracing.memory_checks import check_overlap, may_alias
from lazytpu.tracing.record import cell_of, is_device_tensor, lock, record, results_of
from lazytpu.tracing.sample_tensors import sample_in_storage
from lazytpu.tracing.transaction import Transaction

META = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)
COMPOSED = torch._C.DispatchKeySet(torch._C.DispatchKey.VE)  # a device without kernels of its own, not even in Python
Kernel = Callable[..., object]
_AS_STRIDED = op_of(aten.as_strided.default)
_SELECT, _SLICE, _UNBIND = map(op_of, (aten.select.int, aten.slice.Tensor, aten.unbind.int))


def record_new(op: Op, bound: Sequence[Arg], *, layouts: tuple[Layout, ...] | None = None) -> Arg:
    """Record an op (see `record`) and return its results as new tensors."""
    with lock:
        transaction = Transaction()
        while transaction.open():
            node = record(op, bound, layouts=layouts)
            made = transaction.write_new(node.values)
    return results_of(node, lambda value: make(made[value]))


def on_other_device(args: Sequence[object], kwargs: dict[str, object]) -> bool:
    """Return whether the call is FakeTensor's: it calls our kernels with meta tensors to learn types."""
    for x in (*args, *kwargs.values()):
        if isinstance(x, torch.Tensor):
            if x.device.type == "meta":
                return True
        elif isinstance(x, (list, tuple)) and any(isinstance(e, torch.Tensor) and e.device.type == "meta" for e in x):
            return True
    return False


def call_meta(overload: OpOverload, args: Sequence[object], kwargs: dict[str, object]) -> Arg:
    """Return what the op gives for meta tensors."""
    op = op_of(overload)
    positional, keywords = op.call_form(op.bind(tuple(args), kwargs))
    if "device" in keywords:
        keywords["device"] = torch.device("meta")
    return overload(*positional, **keywords)


def _on_several_devices(overload: OpOverload, args: Sequence[object], kwargs: dict[str, object]) -> Arg:
    """Return what an op gives for meta tensors, or for lists of tensors on several devices, one after the other."""
    if on_other_device(args, kwargs):
        return call_meta(overload, args, kwargs)
    return overload.redispatch(COMPOSED, *args, **kwargs)


def functional(overload: OpOverload) -> Kernel:
    """Return the kernel of an op that makes new tensors."""
    op = op_of(overload)
    lists = overload._schema.name.startswith("aten::_foreach")

    def kernel(*args: object, **kwargs: object) -> object:
        try:
            return record_new(op, op.bind(args, kwargs))
        except MixedDevicesError:
            if lists or on_other_device(args, kwargs):
                return _on_several_devices(overload, args, kwargs)
            raise

    return kernel


def view(overload: OpOverload) -> Kernel:
    """Return the kernel of a view op: a tensor on the same storage, remembered by the layout it came from.

    On a hit the sizes are known and one ``as_strided`` makes the tensor; on a miss torch's own meta kernel
    does, so a wrong ``view`` raises what eager raises.
    """
    op = op_of(overload)
    lists = op.returns is None

    def kernel(tensor: torch.Tensor, *args: object, **kwargs: object) -> object:
        if not is_device_tensor(tensor):
            return call_meta(overload, (tensor, *args), kwargs)
        storage, layout, known = layouts_of(op, tensor, args, kwargs)
        if not lists:
            return _view_tensor(op, tensor, storage, layout, known, args, kwargs)
        return [make_view(tensor, storage, lay) for lay in known]

    return kernel


def layouts_of(
    op: Op, tensor: torch.Tensor, args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[Storage, Layout, Arg]:
    """Return the storage of a tensor, its layout, and the layout (or tuple of layouts) that a view op gives."""
    storage, layout = resolve(cell_of(tensor))
    bound = op.bind((tensor, *args), kwargs)[1:]
    key = (op, *[tuple(b) if type(b) is list else b for b in bound])
    known = layout.children.get(key)
    if known is None:
        known = _new_layouts(op, storage, layout, tuple(b for b in bound if b is not ABSENT))
        layout.remember(key, known)
    return storage, layout, known


def _new_layouts(op: Op, storage: Storage, layout: Layout, args: tuple[object, ...]) -> Layout | tuple[Layout, ...]:
    """Return the layout(s) a view op gives, learned from torch's kernel on a meta tensor that lies the same way."""
    with torch.no_grad(), torch._C.DisableTorchFunction():
        try:
            made = op.overload(sample_in_storage(storage.layout, layout), *args)
        except (RuntimeError, IndexError) as error:  # some messages name the kind of tensor: a meta one
            _raise_as_eager(op, storage, layout, args, error)
    if isinstance(made, (list, tuple)):
        views = _views_of_parts(op, args, made)
        return tuple([layout.child(*view, geometry_of(out)) for view, out in zip(views, made, strict=True)])
    geometry = geometry_of(made)
    _check_bounds(geometry, layout.root)
    if op is _AS_STRIDED:  # speaks of memory, not of the tensor it is called on
        return layout.root.child_at(geometry)
    return layout.child(op, args, geometry)


def _views_of_parts(
    op: Op, args: tuple[Arg, ...], parts: Sequence[torch.Tensor]
) -> Iterator[tuple[Op, tuple[Arg, ...]]]:
    """Yield the view op, with its arguments, for each of the parts that an op takes a tensor apart into.

    So a part is read by an op with one result, however many there are.
    """
    position = op.positions["dim"] - 1
    dim = args[position] if position < len(args) else 0
    stop = 0
    for i, part in enumerate(parts):
        if op is _UNBIND:
            yield _SELECT, (dim, i)
        else:
            start, stop = stop, stop + part.shape[dim]
            yield _SLICE, (dim, start, stop, 1)


def _raise_as_eager(op: Op, storage: Storage, layout: Layout, args: tuple[object, ...], error: Exception) -> NoReturn:
    """Raise what the CPU's kernel of a view op says where that of meta tensors raised ``error``."""
    try:
        op.overload(sample_in_storage(storage.layout, layout, "cpu"), *args)
    except (RuntimeError, IndexError) as eager:
        raise eager.with_traceback(None) from None
    raise error


def _view_tensor(
    op: Op,
    tensor: torch.Tensor,
    storage: Storage,
    parent: Layout,
    layout: Layout,
    args: Sequence[object],
    kwargs: Mapping[str, object],
) -> torch.Tensor:
    if layout.dtype == parent.dtype and layout.bits == parent.bits:
        return make_view(tensor, storage, layout)
    out: LazyTensor = op.overload.redispatch(META, tensor, *args, **kwargs)  # as_strided changes neither dtype nor bits
    out.__class__ = LazyTensor
    out._s = cell_at(storage, layout)
    return out


def _check_bounds(geometry: Geometry, root: Layout) -> None:
    size, stride, offset, dtype, _ = geometry
    if not prod(size):
        return
    last = offset + sum((n - 1) * st for n, st in zip(size, stride, strict=True))
    if (last + 1) * dtype.itemsize > root.nbytes:
        raise RuntimeError(
            f"setStorage: sizes {list(size)}, strides {list(stride)}, storage offset {offset}, and itemsize "
            f"{dtype.itemsize} requiring a storage size of {(last + 1) * dtype.itemsize} are out of bounds for "
            f"storage of size {root.nbytes}"
        )


def in_place(overload: OpOverload, variant: OpOverload) -> Kernel:
    """Return the kernel of an op that writes to its arguments: it records the functional variant, then points the
    storages at its results."""
    op = op_of(overload, variant)
    schema = overload._schema
    written = [op.positions[a.name] for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    read = [i for i, a in enumerate(op.arguments) if a.kind in ("tensor", "tensors") and i not in written]
    returned = len(schema.returns)
    pointwise = torch.Tag.pointwise in overload.tags
    lists = schema.name.startswith("aten::_foreach")

    def kernel(*args: object, **kwargs: object) -> object:
        bound = op.bind(args, kwargs)
        targets = flat([bound[i] for i in written])
        try:
            with lock:
                if may_alias(targets, flat([bound[i] for i in read]), pointwise=pointwise):
                    if lists:  # torch's composition of it writes one tensor after the other, as eager does
                        return overload.redispatch(COMPOSED, *args, **kwargs)
                    check_overlap(overload, args, kwargs)
                cells = [cell_of(target) for target in targets]
                transaction = Transaction(held=cells)
                while transaction.open():
                    values = record(op, bound).values
                    transaction.write_all(cells, values)
                    made = transaction.write_new(values[len(cells) :])
                if lists:  # torch leaves this to the ops it composes them of
                    increment_version(targets)
        except MixedDevicesError:
            if lists or on_other_device(args, kwargs):
                return _on_several_devices(overload, args, kwargs)
            raise
        if returned == 0:
            return None
        results = [*(bound[i] for i in written), *map(make, made.values())][:returned]
        return results[0] if returned == 1 else tuple(results)

    return kernel


def flat(bound: Sequence[Arg]) -> list[Arg]:
    """Return arguments, those of lists one by one."""
    return [x for b in bound for x in (b if isinstance(b, (list, tuple)) else (b,))]


def unsupported(overload: OpOverload, args: Sequence[object], kwargs: dict[str, object]) -> UnsupportedOpError:
    """Return the error for an op that nothing lowers."""
    types = [repr(cell_of(x).layout) for x in (*args, *kwargs.values()) if is_device_tensor(x)]
    return UnsupportedOpError(
        f"{overload.name()} has no lowering and no decomposition",
        at=site.here().describe(),
        given=", ".join(types),
        fix='add a rule (docs/how-to/add-an-op) or set lazytpu.config.fallback = "cpu"',
    )
