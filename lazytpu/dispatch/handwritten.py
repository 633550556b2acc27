"""Kernels that are not made from a schema: creation without contents, copies between devices and reads."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from math import prod
from typing import TypeAlias, TypeVar, cast

import torch

from lazytpu.diagnosis import events
from lazytpu.dispatch import generated
from lazytpu.dispatch.general import META, functional, on_other_device, record_new
from lazytpu.dtypes import host_array
from lazytpu.ir.op_schema import Arg, Op, aten, op_of
from lazytpu.ir.types import contiguous_stride, is_dense
from lazytpu.location import conversion
from lazytpu.location.site import line_here
from lazytpu.lowering import target
from lazytpu.observe import step_statistics
from lazytpu.runtime import meshes, transfers
from lazytpu.tensors import unsent
from lazytpu.tensors.layout import in_rows, root_layout
from lazytpu.tensors.storage import Cell, Storage, new_storage, resolve, write_buffer
from lazytpu.tensors.tensor import LazyTensor, make, make_view
from lazytpu.tracing.memory_checks import check_overlap, may_alias
from lazytpu.tracing.reading import read
from lazytpu.tracing.record import cell_of, is_device_tensor, lock, record
from lazytpu.tracing.transaction import Transaction, check_broadcast, write_cast

_TO_COPY = op_of(aten._to_copy.default)
_copied: Callable[..., torch.Tensor] = generated.functional(_TO_COPY, functional(_TO_COPY.overload))
_FULL = op_of(aten.full.default)
_BATCH_NORM = op_of(aten._native_batch_norm_legit_functional.default)
_WITH_UPDATE = op_of(aten._batch_norm_with_update_functional.default)
_NO_STATS = op_of(aten._native_batch_norm_legit.no_stats)

Device: TypeAlias = torch.device | str | int
_MAX_DIMS = 64  # of an array of numpy

_Kernel = TypeVar("_Kernel", bound=Callable[..., object])
special: dict[str, Callable[..., object]] = {}
"""Overload (``add.Tensor``) to its kernel."""


def kernel(*names: str) -> Callable[[_Kernel], _Kernel]:
    """Register a kernel for the named overloads."""

    def register(function: _Kernel) -> _Kernel:
        special.update(dict.fromkeys(names, function))
        return function

    return register


# --- creation without contents: nothing is recorded until somebody reads or writes ---------------------


def uninitialized(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype | None) -> LazyTensor:
    """Return a tensor whose contents are not defined."""
    size, stride, dtype = tuple(size), tuple(stride), dtype or torch.get_default_dtype()
    if is_dense(size, stride):
        return make(new_storage(root_layout(size, stride, dtype)))
    numel = 1 + sum((n - 1) * st for n, st in zip(size, stride, strict=True)) if prod(size) else 0
    storage = new_storage(root_layout((numel,), (1,), dtype))
    return make_view(make(storage), storage, storage.layout.child_at((size, stride, 0, dtype, 0)))


def _strides(size: Sequence[int], memory_format: torch.memory_format | None) -> Sequence[int]:
    if memory_format in (None, torch.contiguous_format, torch.preserve_format):
        return contiguous_stride(size)
    return torch.empty(tuple(size), device="meta", memory_format=memory_format).stride()


@kernel("empty.memory_format")
def empty(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    memory_format: torch.memory_format | None = None,
    **_: object,
) -> LazyTensor:
    return uninitialized(size, _strides(size, memory_format), dtype)


@kernel("empty_strided")
def empty_strided(
    size: Sequence[int], stride: Sequence[int], *, dtype: torch.dtype | None = None, **_: object
) -> LazyTensor:
    return uninitialized(size, stride, dtype)


@kernel("empty_permuted")
def empty_permuted(
    size: Sequence[int], physical_layout: Sequence[int], *, dtype: torch.dtype | None = None, **_: object
) -> LazyTensor:
    meta = torch.empty_permuted(tuple(size), tuple(physical_layout), dtype=dtype, device="meta")
    return uninitialized(meta.shape, meta.stride(), meta.dtype)


@kernel("empty_like", "new_empty", "new_empty_strided")
def empty_like(
    tensor: torch.Tensor,
    *args: Sequence[int],
    dtype: torch.dtype | None = None,
    device: Device | None = None,
    memory_format: torch.memory_format | None = None,
    **_: object,
) -> torch.Tensor:
    dtype = dtype or tensor.dtype
    if device is not None and torch.device(device).type != LazyTensor.device_type:
        size = args[0] if args else tensor.shape
        stride = args[1] if len(args) > 1 else _like_stride(tensor, memory_format) if not args else _strides(size, None)
        return torch.empty_strided(tuple(size), tuple(stride), dtype=dtype, device=device)
    if tensor.device.type == "meta":
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device="meta")
    if len(args) == 2:
        return uninitialized(args[0], args[1], dtype)
    if args:
        return uninitialized(args[0], contiguous_stride(args[0]), dtype)
    return uninitialized(tensor.shape, _like_stride(tensor, memory_format), dtype)


def _like_stride(tensor: torch.Tensor, memory_format: torch.memory_format | None) -> Sequence[int]:
    if memory_format in (None, torch.preserve_format) and is_dense(tensor.shape, tensor.stride()):
        return tensor.stride()  # that of dimensions of one element, too, which the meta kernel makes up anew
    meta = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return torch.empty_like(meta, memory_format=memory_format or torch.preserve_format).stride()


@kernel("_new_zeros_with_same_feature_meta")
def new_zeros_with_same_feature_meta(
    tensor: torch.Tensor, other: torch.Tensor, *, self_num_batch_dims: int = 0
) -> torch.Tensor:
    """Zeros for a tangent: they lie in a storage as ``other`` does in its own, with ``tensor``'s batch in front."""
    batch = tensor.shape[:self_num_batch_dims]
    root = resolve(cell_of(other))[0].layout
    numel = root.nbytes // other.element_size()
    strides = [st * numel for st in contiguous_stride(batch)]
    zeros = torch.zeros(prod(batch) * numel, dtype=other.dtype, device=other.device)
    return zeros.as_strided((*batch, *other.shape), (*strides, *other.stride()), other.storage_offset())


# --- copies ----------------------------------------------------------------------------------------------


@kernel("copy_")
def copy_(dst: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if not is_device_tensor(dst):
        if is_device_tensor(src) and dst.device.type != "meta":
            dst.copy_(read(src, "copy to the CPU"))
        return dst
    if is_device_tensor(src) and _lie_alike(cell_of(dst), cell_of(src)):  # `x[i] += y` ends with such a copy
        return dst
    if may_alias([dst], [src], pointwise=True):
        check_overlap(aten.copy_.default, (dst, src), {})
    if is_device_tensor(src):
        write_cast(cell_of(dst), cell_of(src))
    else:
        _upload(dst, src)
    return dst


def _lie_alike(a: Cell, b: Cell) -> bool:
    """Return whether two cells are the same elements of one storage, each of them once."""
    if a is b:
        return True
    (storage, layout), (other, as_other) = resolve(a), resolve(b)
    return storage is other and layout is as_other and not layout.overlapping


@kernel("_copy_from", "_copy_from_and_resize")
def copy_from(src: torch.Tensor, dst: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    return copy_(dst, src)


def _upload(dst: torch.Tensor, src: torch.Tensor) -> None:
    """``dst[:] = src`` from the host."""
    if src.shape != dst.shape:
        check_broadcast(src.shape, dst.shape)
        src = src.expand(dst.shape)
    began = time.perf_counter()
    host = src.detach().to(dst.dtype)
    with lock:
        cell = cell_of(dst)
        storage, layout = resolve(cell)
        buffer = transfers.to_device(host)
        if layout is storage.layout:
            if storage.sharding is not None and storage.sharding.own:
                storage.sharding = None
            if storage.sharding is not None:
                buffer = meshes.put(buffer, storage.sharding, layout.size)
            write_buffer(storage, buffer)
            storage.origin = site = line_here()
        else:
            source = in_rows(layout.size, layout.dtype)
            write_cast(cell, new_storage(source, buffer))
            site = line_here()
    events.uploaded(site, time.perf_counter() - began, host.nbytes)


def from_host(tensor: torch.Tensor, *, copied: bool = True) -> torch.Tensor:
    """Return a device tensor with the sizes, strides and contents of a CPU tensor.

    Args:
        copied: one without elements gets the strides of a copy; else its own.
    """
    if tensor.dim() > _MAX_DIMS:
        raise RuntimeError(f"only tensors with up to {_MAX_DIMS} dims are supported on this device")
    began = time.perf_counter()
    if tensor.numel():
        stride = tuple(_like_stride(tensor, None))
    else:
        stride = contiguous_stride(tensor.shape) if copied else tensor.stride()
    layout = root_layout(tuple(tensor.shape), stride, tensor.dtype)
    if unsent.choices and not step_statistics.in_background() and target.described() is None:
        storage: Storage = unsent.unsent(layout, host_array(tensor))
    else:
        storage = new_storage(layout, transfers.to_device(tensor))
    storage.origin = site = line_here()
    events.uploaded(site, time.perf_counter() - began, tensor.nbytes)
    return make(storage)


@kernel("_to_copy")
def to_copy(
    tensor: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    device: Device | None = None,
    memory_format: torch.memory_format | None = None,
    **rest: object,
) -> torch.Tensor:
    if not is_device_tensor(tensor):
        if tensor.device.type == "meta":
            options = {"dtype": dtype, "device": torch.device("meta"), "memory_format": memory_format}
            return cast(torch.Tensor, aten._to_copy.default(tensor, **options))
        host = tensor.detach().to(dtype=dtype, memory_format=memory_format or torch.preserve_format)
        return from_host(host)
    kind = LazyTensor.device_type if device is None else torch.device(device).type
    if kind == LazyTensor.device_type:
        return _copied(tensor, dtype=dtype or tensor.dtype, **_format(memory_format))
    if kind == "meta":
        return torch.empty_strided(
            tensor.shape, _like_stride(tensor, memory_format), dtype=dtype or tensor.dtype, device=device
        )
    host = read(tensor, "copy to the CPU")
    return host.to(device=device, dtype=dtype or host.dtype, **_format(memory_format))


def _format(memory_format: torch.memory_format | None) -> dict[str, Arg]:
    return {} if memory_format is None else {"memory_format": memory_format}


@kernel("_local_scalar_dense")
def local_scalar_dense(tensor: torch.Tensor) -> complex:
    return read(tensor, conversion.what_was_written()).item()


@kernel("equal")
def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.device != b.device:
        raise RuntimeError(f"Expected all tensors to be on the same device, but got {a.device} and {b.device}")
    return torch.equal(read(a, "equal"), read(b, "equal"))


# --- filling: the old contents do not matter, so they are not loaded --------------------------------------


def _fill(tensor: torch.Tensor, value: object) -> torch.Tensor:
    cell = cell_of(tensor)
    layout = cell.layout
    bound = _FULL.bind((list(layout.size), value), {"dtype": layout.dtype})
    with lock:
        transaction = Transaction()
        while transaction.open():
            transaction.write(cell, record(_FULL, bound, layouts=(layout,)).value)
    return tensor


@kernel("zero_")
def zero_(tensor: torch.Tensor) -> torch.Tensor:
    return _fill(tensor, 0) if is_device_tensor(tensor) else tensor


@kernel("fill_.Scalar")
def fill_scalar(tensor: torch.Tensor, value: object) -> torch.Tensor:
    return _fill(tensor, value) if is_device_tensor(tensor) else tensor


@kernel("fill_.Tensor")
def fill_tensor(tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if tensor.device.type == "meta":
        return tensor
    if value.dim():
        raise RuntimeError(
            f"fill_ only supports 0-dimension value tensor but got tensor with {value.dim()} dimensions."
        )
    if not is_device_tensor(tensor):
        return tensor.fill_(value.item())
    if may_alias([tensor], [value], pointwise=False):
        check_overlap(aten.fill_.Tensor, (tensor, value), {})
    if not is_device_tensor(value):
        return _fill(tensor, value.item())
    write_cast(cell_of(tensor), cell_of(value))
    return tensor


# --- metadata ----------------------------------------------------------------------------------------------


@kernel("is_set_to")
def is_set_to(a: torch.Tensor, b: torch.Tensor) -> bool:
    same = is_device_tensor(a) and is_device_tensor(b) and resolve(cell_of(a))[0] is resolve(cell_of(b))[0]
    return same and a.storage_offset() == b.storage_offset() and a.shape == b.shape and a.stride() == b.stride()


@kernel("is_pinned")
def is_pinned(tensor: torch.Tensor, device: object = None) -> bool:
    return False


@kernel("_pin_memory")
def pin_memory(tensor: torch.Tensor, device: object = None) -> torch.Tensor:
    raise RuntimeError(f"cannot pin '{tensor.type()}' only dense CPU tensors can be pinned")


# --- packed sequences: their sizes live on the CPU ---------------------------------------------------------


@kernel("_pack_padded_sequence")
def pack_padded_sequence(
    tensor: torch.Tensor, lengths: torch.Tensor, batch_first: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Torch packs the positions of the steps on the CPU; the device takes the steps from there."""
    if is_device_tensor(lengths):
        kind = torch.empty(0, dtype=lengths.dtype, device="cpu").type().removeprefix("torch.").removesuffix("Tensor")
        raise RuntimeError(
            "'lengths' argument should be a 1D CPU int64 tensor, but got "
            f"{lengths.dim()}D {lengths.device} {kind} tensor"
        )
    steps = tensor.transpose(0, 1) if batch_first else tensor
    positions = torch.arange(steps.shape[0] * steps.shape[1], device="cpu").reshape(*steps.shape[:2], 1)
    positions = positions.transpose(0, 1) if batch_first else positions
    packed, sizes = torch._pack_padded_sequence(positions, lengths, batch_first)
    flat = steps.reshape(-1, *steps.shape[2:])
    return flat.index_select(0, packed.reshape(-1).to(tensor.device)), sizes


# --- batch norm: its schema hides that it writes the running statistics ---------------------------------


@kernel("native_batch_norm", "_native_batch_norm_legit")
def native_batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor | None,
    var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> object:
    if on_other_device((x, weight, bias, mean, var), {}):
        return aten.native_batch_norm.default.redispatch(META, x, weight, bias, mean, var, training, momentum, eps)
    if mean is None or var is None:
        return record_new(_NO_STATS, [x, weight, bias, training or mean is None, momentum, eps])
    bound = [x, weight, bias, mean, var, training, momentum, eps]
    if training:
        return _with_statistics(_BATCH_NORM, bound)
    no_statistics = [uninitialized((0,), (1,), x.dtype) for _ in range(2)]  # eager saves nothing then
    return record_new(_BATCH_NORM, bound)[0], *no_statistics


def _with_statistics(op: Op, bound: Sequence[Arg]) -> tuple[torch.Tensor, ...]:
    """Record a batch norm whose last two results go to the running statistics; return the others."""
    mean, var = bound[3:5]
    with lock:
        transaction = Transaction()
        while transaction.open():
            *values, new_mean, new_var = record(op, bound).values
            transaction.write_all((cell_of(mean), cell_of(var)), (new_mean, new_var))
            made = transaction.write_new(values)
    return tuple([make(storage) for storage in made.values()])


@kernel("_batch_norm_with_update")
def batch_norm_with_update(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    var: torch.Tensor,
    momentum: float,
    eps: float,
) -> object:
    if on_other_device((x, weight, bias, mean, var), {}):
        return aten._batch_norm_with_update.default.redispatch(META, x, weight, bias, mean, var, momentum, eps)
    return _with_statistics(_WITH_UPDATE, [x, weight, bias, mean, var, momentum, eps])
