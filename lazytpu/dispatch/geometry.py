"""Kernels about where a tensor lies in memory: in-place view ops, ``set_``, ``resize_`` and copies by stride.

The layout is asked of a meta tensor that lies the same way, so torch's own checks and rules hold; then the
C++ tensor is pointed there and its cell with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from lazytpu.dispatch.general import META, Kernel, call_meta, layouts_of
from lazytpu.dispatch.handwritten import kernel
from lazytpu.ir.op_schema import OpOverload, aten, functional_variant, op_of
from lazytpu.ir.tree import trace
from lazytpu.ir.types import is_dense
from lazytpu.tensors.layout import Layout, geometry_of, root_layout
from lazytpu.tensors.storage import NOTHING, Storage, cell_at, new_storage, resolve
from lazytpu.tensors.tensor import forget_cell, make
from lazytpu.torch_backend.saving import settle
from lazytpu.tracing.record import cell_of, is_device_tensor, lock, record
from lazytpu.tracing.sample_tensors import sample_in_storage
from lazytpu.tracing.transaction import Transaction

_SLICE_SCATTER = op_of(aten.slice_scatter.default)
_set = aten.set_.source_Storage_storage_offset
_PLAIN = torch.Tensor.__torch_dispatch__


def in_place_view(overload: OpOverload) -> Kernel:
    """Return the kernel of an op such as ``t_``: the layout that ``t`` gives becomes the tensor's own."""
    plain = functional_variant(overload)
    assert plain is not None, overload
    op = op_of(plain)

    def kernel(tensor: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        if not is_device_tensor(tensor):
            found: torch.Tensor = call_meta(overload, (tensor, *args), kwargs)
            return found
        if type(tensor).__torch_dispatch__ is not _PLAIN:  # it stands for a tensor that has the memory
            return cast(torch.Tensor, overload.redispatch(META, tensor, *args, **kwargs))
        try:
            storage, _, layout = layouts_of(op, tensor, args, kwargs)
        except (RuntimeError, IndexError):  # its message names ``t``, not ``t_``
            storage, layout = resolve(cell_of(tensor))
            overload(sample_in_storage(storage.layout, layout, "cpu"), *args, **kwargs)
            raise
        return _place(tensor, tensor.untyped_storage(), storage, layout)

    return kernel


def _place(tensor: torch.Tensor, raw: torch.UntypedStorage, storage: Storage, layout: Layout) -> torch.Tensor:
    """Make a tensor lie in ``storage``, whose C++ storage is ``raw``, as ``layout``."""
    forget_cell(tensor)  # an interrupt in between leaves a tensor that finds its cell again
    _set.redispatch(META, tensor, raw, layout.offset, layout.size, layout.stride)
    tensor._s = cell_at(storage, layout)  # type: ignore[attr-defined]
    return tensor


def _place_as(tensor: torch.Tensor, raw: torch.UntypedStorage, storage: Storage, meta: torch.Tensor) -> torch.Tensor:
    """Do as `_place` where a meta tensor lies, in a storage that is made as large as its storage is."""
    if meta.untyped_storage().nbytes() > storage.layout.nbytes:
        storage = _grow(storage, raw, meta)
    return _place(tensor, raw, storage, storage.layout.child_at(geometry_of(meta)))


def _grow(storage: Storage, raw: torch.UntypedStorage, meta: torch.Tensor) -> Storage:
    """Move the contents to a larger storage; tensors that still hold the old one are led to it."""
    flat = storage.layout.flat()
    written = storage.buffer is not None or storage.step == trace.step
    nbytes, size, stride = meta.untyped_storage().nbytes(), tuple(meta.shape), meta.stride()
    whole = not meta.storage_offset() and nbytes == meta.nbytes and is_dense(size, stride)
    if whole and not (written and flat.size[0]):
        larger = new_storage(root_layout(size, stride, meta.dtype))
    else:
        numel = -(-nbytes // flat.dtype.itemsize)
        larger = new_storage(root_layout((numel,), (1,), flat.dtype))
        if written:
            old, place = cell_at(storage, flat), (0, 0, flat.size[0])
            with lock:
                transaction = Transaction()
                while transaction.open():
                    node = record(_SLICE_SCATTER, [larger, old, *place], layouts=(larger.layout,))
                    transaction.write(larger, node.value)
    geometry = (*storage.layout.geometry[:2], 0, storage.layout.dtype, 0)
    storage.moved = (larger, larger.layout.child_at(geometry))
    storage.value, storage.step, storage.buffer, storage.reads = NOTHING, 0, None, None
    raw._s = larger  # type: ignore[attr-defined]
    return larger


@kernel("resize_")
def resize_(
    tensor: torch.Tensor, size: Sequence[int], *, memory_format: torch.memory_format | None = None
) -> torch.Tensor:
    if not is_device_tensor(tensor):
        return tensor.resize_(size, memory_format=memory_format)
    with lock, torch.no_grad(), torch._C.DisableTorchFunction():
        storage, layout = resolve(cell_of(tensor))
        meta = sample_in_storage(storage.layout, layout).resize_(size, memory_format=memory_format)
        return _place_as(tensor, tensor.untyped_storage(), storage, meta)


@kernel("resize_as_")
def resize_as_(
    tensor: torch.Tensor, template: torch.Tensor, *, memory_format: torch.memory_format | None = None
) -> torch.Tensor:
    """Composed by torch of `resize_`."""
    found: torch.Tensor = aten.resize_as_.default.redispatch(META, tensor, template, memory_format=memory_format)
    return found


@kernel("set_")
def set_nothing(tensor: torch.Tensor) -> torch.Tensor:
    if not is_device_tensor(tensor):
        found: torch.Tensor = aten.set_.default(tensor)
        return found
    storage = new_storage(root_layout((0,), (1,), tensor.dtype))
    return _place(tensor, make(storage).untyped_storage(), storage, storage.layout)


@kernel("set_.source_Tensor")
def set_tensor(tensor: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    if not (is_device_tensor(tensor) and is_device_tensor(source)):
        raw = source.untyped_storage()
        return cast(torch.Tensor, _set.redispatch(META, tensor, raw, 0, (), ()))  # raises
    with lock, torch.no_grad(), torch._C.DisableTorchFunction():
        storage, layout = resolve(cell_of(source))
        torch.empty(0, dtype=tensor.dtype, device="meta").set_(sample_in_storage(storage.layout, layout))  # type: ignore[call-overload] # raises
        return _place(tensor, source.untyped_storage(), storage, layout)


@kernel("set_.source_Storage", "set_.source_Storage_storage_offset")
def set_storage(
    tensor: torch.Tensor,
    raw: torch.UntypedStorage,
    offset: int = 0,
    size: Sequence[int] | None = None,
    stride: Sequence[int] = (),
) -> torch.Tensor:
    if not is_device_tensor(tensor):
        return tensor.set_(raw) if size is None else tensor.set_(raw, offset, size, stride)
    if raw.device.type != tensor.device.type:
        found: torch.Tensor = _set.redispatch(META, tensor, raw, offset, size or (), stride)  # raises
        return found
    with lock, torch.no_grad(), torch._C.DisableTorchFunction():
        storage = _state_of(raw)
        memory = torch.empty(storage.layout.nbytes, dtype=torch.uint8, device="meta").untyped_storage()
        meta = torch.empty(0, dtype=tensor.dtype, device="meta")
        meta = meta.set_(memory) if size is None else meta.set_(memory, offset, size, stride)
        if storage.host is not None:
            settle(storage, meta)
        _place_as(tensor, raw, storage, meta)
        forget_cell(tensor)  # torch.load may yet set its conjugate or negative bit
        return tensor


def _state_of(raw: torch.UntypedStorage) -> Storage:
    state: Storage | None = getattr(raw, "_s", None)
    if state is None:  # C++ made it without asking us
        state = raw._s = new_storage(root_layout((raw.nbytes(),), (1,), torch.uint8))  # type: ignore[attr-defined]
    return resolve(state)[0]


# --- copies by stride: recorded ops see elements, and these speak of the memory around them -----------------


@kernel("as_strided_copy")
def as_strided_copy(
    tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> torch.Tensor:
    view: torch.Tensor = aten.as_strided.default(tensor, size, stride, storage_offset)
    return view.clone(memory_format=torch.contiguous_format)


@kernel("as_strided_scatter")
def as_strided_scatter(
    tensor: torch.Tensor,
    source: torch.Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> torch.Tensor:
    whole = resolve(cell_of(tensor))[0].layout.nbytes if is_device_tensor(tensor) else tensor.untyped_storage().nbytes()
    memory = aten.as_strided.default(tensor, (whole // tensor.dtype.itemsize,), (1,), 0).clone()
    copy: torch.Tensor = aten.as_strided.default(memory, tensor.shape, tensor.stride(), tensor.storage_offset())
    target = aten.as_strided.default(copy, size, stride, storage_offset)
    if target.shape != source.shape:
        raise RuntimeError(
            f"expected src to have a size equal to the slice of self. src size = {list(source.shape)}, "
            f"slice size = {list(target.shape)}"
        )
    target.copy_(source)
    return copy
