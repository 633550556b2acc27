"""Buffers in and out without a copy: `to_jax`, `from_jax`, DLPack.

A buffer that somebody else holds is marked as shared and so is never donated (step.py): the next write to the
tensor goes to memory of its own, and the array keeps what it had.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import jax
import torch

from lazytpu.dtypes import to_torch
from lazytpu.ir.tree import trace
from lazytpu.observe import metrics
from lazytpu.runtime import client, meshes
from lazytpu.tensors.layout import in_rows
from lazytpu.tensors.storage import Storage, new_storage, resolve
from lazytpu.tensors.tensor import LazyTensor, make
from lazytpu.tracing import reading, record
from lazytpu.tracing.record import cell_of, is_device_tensor


def to_jax(tensor: torch.Tensor) -> jax.Array:
    """Return the contents of a device tensor as a jax array, without a copy.

    The graph that computes the tensor runs.  Writing to the tensor afterwards does not change the array.  Do not let
    jax donate the array (``jax.jit(..., donate_argnums=...)``) while the tensor is in use: it would lose its contents.

    Args:
        tensor: on the device.  A view that is not all of its storage is computed first; ``complex32`` comes as
            ``complex64``.

    Returns:
        An array of the same shape and dtype on the device.  64-bit types stay so, even where ``jax_enable_x64`` is
        off.

    Raises:
        TypeError: it is no device tensor.
        RuntimeError: it requires a gradient, which jax would not see.
    """
    if not is_device_tensor(tensor):
        raise TypeError(f"to_jax takes a tensor on the device, not {_describe(tensor)}")
    if tensor.requires_grad:
        raise RuntimeError("Can't export tensors that require gradient, use tensor.detach()")
    array: jax.Array = share_buffer(tensor)
    return array


def _describe(x: object) -> str:
    return f"one on {x.device}" if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"


def share_buffer(tensor: torch.Tensor) -> Any:
    """Return the buffer of a tensor, never to be donated from now on."""
    with record.lock:
        storage, layout = resolve(cell_of(tensor))
        if layout is not storage.layout:
            with torch.no_grad():
                storage, _ = resolve(cell_of(tensor.clone(memory_format=torch.contiguous_format)))
        buffer = reading.buffer_of(storage, "to_jax")
        mark_shared(storage, buffer)
        return meshes.whole_of(buffer, storage.layout.size)


def mark_shared(storage: Storage, buffer: object) -> None:
    """Keep ``buffer`` from being donated by whatever storage holds it, now or as an input of the pending graph."""
    if storage.buffer is buffer:
        storage.shared = True
    for i, (owner, held, _) in enumerate(trace.inputs):
        if held is buffer:
            trace.inputs[i] = (owner, held, True)
            if owner.buffer is buffer:
                owner.shared = True


def from_jax(array: jax.Array) -> torch.Tensor:
    """Return a device tensor with the contents of a jax array, without a copy where it is on the device already.

    Writing to the tensor does not change the array.

    Args:
        array: of any shape, on one device or on a mesh (``NamedSharding``); not one that a transformation of jax's is
            tracing.

    Returns:
        A tensor of the same shape and dtype, and with the same sharding.

    Raises:
        TypeError: it is no concrete array, or torch does not have its dtype.
        ValueError: it was donated, or is spread over several devices in another way.
    """
    if isinstance(array, jax.core.Tracer) or not isinstance(array, jax.Array):
        raise TypeError(f"from_jax takes a jax array with contents, not a {type(array).__name__}")
    dtype = to_torch(array.dtype)
    if array.is_deleted():
        raise ValueError("from_jax: the array was donated or deleted, and has no contents any more")
    if len(array.sharding.device_set) > 1:
        return _on_mesh(array, dtype)
    device = client.device()
    if array.sharding.device_set != {device} or array.sharding.memory_kind not in (None, _memory_kind(device)):
        metrics.count("transfer_in")
        metrics.count("transfer_in_bytes", array.nbytes)
        with jax.enable_x64(True):
            array = jax.device_put(array, device)
    storage = new_storage(in_rows(array.shape, dtype), array)
    storage.shared = True
    return make(storage)


def _on_mesh(array: jax.Array, dtype: torch.dtype) -> torch.Tensor:
    if not isinstance(array.sharding, jax.sharding.NamedSharding):
        raise ValueError(f"from_jax takes an array on one device or with a NamedSharding, not with {array.sharding}")
    storage = new_storage(in_rows(array.shape, dtype), array)
    storage.shared, storage.sharding = True, meshes.taken(array)
    return make(storage)


def _memory_kind(device: jax.Device) -> str | None:
    return device.default_memory().kind if hasattr(device, "default_memory") else None


# --- DLPack -------------------------------------------------------------------------------------------------------


class DeviceType(IntEnum):
    """Kinds of devices, as DLPack numbers them."""

    CPU = 1
    CUDA = 2
    ROCM = 10


def dlpack_device(tensor: torch.Tensor) -> tuple[IntEnum, int]:
    """Return where DLPack finds a device tensor's contents: on the GPU if torch can use it too, else on the CPU."""
    if client.platform() == "gpu" and torch.cuda.is_available():
        kind = DeviceType.ROCM if torch.version.hip else DeviceType.CUDA
        return kind, int(client.device().local_hardware_id or 0)
    return DeviceType.CPU, 0


def dlpack(
    tensor: torch.Tensor,
    *,
    stream: object = None,
    max_version: tuple[int, int] | None = None,
    dl_device: tuple[IntEnum, int] | None = None,
    copy: bool | None = None,
) -> Any:
    """Return a DLPack capsule of a device tensor.

    Args:
        stream, max_version, dl_device, copy: as the array API standard has them.  What is exported is a copy, as the
            consumer may write to it, unless ``copy=False`` asks for the buffer itself; writing to that is forbidden.

    Raises:
        BufferError: the contents cannot be had without a copy, or not on ``dl_device``.
        RuntimeError: the tensor requires a gradient.
    """
    if tensor.requires_grad:
        raise BufferError("Can't export tensors that require gradient, use tensor.detach()")
    here = dlpack_device(tensor)
    wanted = here if dl_device is None else (int(dl_device[0]), dl_device[1])
    if copy is not False and wanted[0] == DeviceType.CPU:
        return tensor.detach().cpu().__dlpack__(max_version=max_version)
    if wanted != here:
        raise BufferError(f"the tensor is on {_name(here)}, and {_name(wanted)} cannot have it without a copy")
    buffer = share_buffer(tensor)
    if copy is not False:
        metrics.count("dlpack_copy")
        with jax.enable_x64(True):
            buffer = jax.numpy.array(buffer, copy=True)
    buffer.block_until_ready()  # a view of one that failed ends the process
    with jax.enable_x64(True):
        return buffer.__dlpack__(stream=stream, max_version=max_version)


def _name(device: tuple[int, int]) -> str:
    names = {kind.value: kind.name for kind in DeviceType}
    return f"{names.get(int(device[0]), f'device type {int(device[0])}')}:{device[1]}"


def register() -> None:
    """Give device tensors their DLPack methods; called once, by ``import lazytpu``."""
    LazyTensor.__dlpack__ = dlpack  # type: ignore[method-assign,assignment]
    LazyTensor.__dlpack_device__ = dlpack_device  # type: ignore[method-assign,assignment]
