"""Storages of device tensors as Python sees them, and the ways of a tensor out of the process and back.

``t.untyped_storage()`` owns no bytes in C++.  `LazyStorage` gives it the size, address and contents that
torch, safetensors and others ask of a storage, so that saving a device tensor is torch's own code: the
contents of its storage, tagged with the location ``tpu:0``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container
from math import prod
from multiprocessing.reduction import ForkingPickler
from typing import Any, cast

import torch

from lazytpu.ir.op_schema import Arg
from lazytpu.ir.types import is_dense
from lazytpu.runtime import transfers
from lazytpu.tensors.copying import deepcopy_tensor, reduce_tensor
from lazytpu.tensors.layout import root_layout
from lazytpu.tensors.printing import represent
from lazytpu.tensors.storage import Storage, new_storage, resolve, write_buffer
from lazytpu.tensors.tensor import LazyTensor, lazy
from lazytpu.torch_backend import rank_device
from lazytpu.tracing import record
from lazytpu.tracing.reading import contents_of
from lazytpu.tracing.transaction import Transaction

_ALIGNMENT = 64
_PLAIN = torch.Tensor.__torch_dispatch__
_next_address = 1 << 46  # above what an allocator gives out


class LazyStorage(torch.UntypedStorage):
    """The storage of a device tensor.

    Its address is a name: unique, and as far from the next as the storage is long, but nothing can be read there.
    """

    _s: Storage

    def __new__(cls, *args: Arg, **kwargs: Arg) -> Arg:
        """Return a storage of the CPU, as ``torch.UntypedStorage`` does: `storage_of` makes those of the device."""
        return torch.UntypedStorage(*args, **kwargs)

    def data_ptr(self) -> int:
        global _next_address
        state = resolve(self._s)[0]
        if not state.address:
            with record.lock:
                state.address = _next_address
                _next_address += max(_ALIGNMENT, -(-self.nbytes() // _ALIGNMENT) * _ALIGNMENT)
        return state.address

    def nbytes(self) -> int:
        state = resolve(self._s)[0]
        if state.freed:
            return 0
        return state.host.nbytes() if state.host is not None else state.layout.nbytes

    def size(self) -> int:
        return self.nbytes()

    def __len__(self) -> int:
        return self.nbytes()

    def cpu(self) -> Any:
        """Return a copy of the contents."""
        state = resolve(self._s)[0]
        if state.host is not None:
            return state.host.clone()
        memory = torch.empty_strided(state.layout.size, state.layout.stride, dtype=state.layout.dtype)
        return memory.copy_(contents_of(state, "save")).untyped_storage()

    def clone(self) -> LazyStorage:
        """Return a storage of its own with the same contents, laid out alike, and no memory until one is written."""
        state = resolve(self._s)[0]
        copy = new_storage(state.layout)
        copy.sharding = state.sharding
        if state.host is not None:
            copy.host = state.host.clone()
        else:
            with record.lock:
                transaction = Transaction()
                while transaction.open():
                    transaction.write(copy, record.load(state))
        return storage_of(copy)

    def to(self, *, device: Any, non_blocking: bool = False) -> torch.UntypedStorage:
        device = torch.device(device)
        return self if device.type == self.device.type else self.cpu().to(device=device, non_blocking=non_blocking)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __getitem__(self, index: Any) -> Any:
        return self.cpu()[index]

    def resize_(self, size: int) -> LazyStorage:
        """Drop the contents, for a size of 0; allocate again, for the size that it had, contents that nobody knows.

        Tensors go on sharing it.

        Raises:
            NotImplementedError: it is another size.
        """
        state = resolve(self._s)[0]
        if size not in (0, state.layout.nbytes):
            raise NotImplementedError(
                f"the storage of a device tensor of {state.layout.nbytes} bytes can be resized to none and back, "
                f"not to {size}; use tensor.resize_"
            )
        with record.lock:
            if size != self.nbytes():
                state.host = None
                write_buffer(state, None)
            state.freed = size == 0
        return self

    def _set_from_file(self, file: object, offset: object, is_real_file: bool, element_size: int) -> LazyStorage:
        """Read the contents, where a file of torch's old format has them."""
        state = resolve(self._s)[0]
        host = torch.UntypedStorage(self.nbytes())
        host._set_from_file(file, offset, is_real_file, element_size)
        if state.host is not None:
            state.host = host
        else:
            _fill(state, host)
        return self

    def _write_file(self, *arguments: Any) -> None:
        self.cpu()._write_file(*arguments)

    def _unsupported(self, *args: object, **kwargs: object) -> Any:
        raise NotImplementedError(
            "the storage of a device tensor can be read, copied and saved; to change it, use the tensor"
        )

    __setitem__ = copy_ = fill_ = byteswap = _unsupported


def storage_of(state: Storage) -> LazyStorage:
    """Return a C++ storage for a state that has none yet."""
    raw = cast(LazyStorage, torch._C._acc.create_empty_tensor((0,), state.layout.dtype).untyped_storage())
    raw.__class__ = LazyStorage
    raw._s = state
    return raw


def settle(state: Storage, tensor: torch.Tensor) -> None:
    """Give a storage that was loaded from a file the type of the first tensor that lies in it.

    Args:
        state: its ``host`` holds the contents.
        tensor: lies in the storage as the tensor will, on any device.
    """
    host = state.host
    assert host is not None
    size, stride, dtype, nbytes = tuple(tensor.shape), tensor.stride(), tensor.dtype, host.nbytes()
    if not tensor.storage_offset() and prod(size) * dtype.itemsize == nbytes and is_dense(size, stride):
        state.layout = root_layout(size, stride, dtype)
    elif nbytes % dtype.itemsize == 0:
        state.layout = root_layout((nbytes // dtype.itemsize,), (1,), dtype)
    state.host = None
    _fill(state, host)


def _fill(state: Storage, host: torch.UntypedStorage) -> None:
    layout = state.layout
    memory = torch.empty(0, dtype=layout.dtype, device="cpu").set_(host, 0, layout.size, layout.stride)
    write_buffer(state, transfers.to_device(memory))


_copy_plain = torch.UntypedStorage.copy_


def copy_(self: torch.UntypedStorage, source: torch.UntypedStorage, non_blocking: bool = False) -> Arg:
    """``copy_`` of a storage of the CPU, from one of the device as well."""
    return _copy_plain(self, source.cpu() if isinstance(source, LazyStorage) else source, non_blocking)


# --- torch.load --------------------------------------------------------------------------------------------------


def _location(storage: Any) -> str | None:
    if storage.device.type == LazyTensor.device_type:
        return str(storage.device)
    return getattr(storage, "lazytpu_location", None)


def _restore(storage: Any, location: str) -> LazyStorage | None:
    if location.partition(":")[0] != LazyTensor.device_type:
        return None
    index = int(location.partition(":")[2] or 0)
    if not rank_device.is_own(index):
        raise RuntimeError(
            f"a storage was saved on {location}, but {rank_device.refused(index)}. "
            "Use torch.load with map_location to map your storages to an existing device."
        )
    return _of_host(storage)


def _of_host(storage: torch.UntypedStorage) -> LazyStorage:
    """Return a device storage with the contents of a CPU storage, which nobody writes to any more."""
    state = new_storage(root_layout((storage.nbytes(),), (1,), torch.uint8))
    state.host = storage
    return storage_of(state)


def to_storage(storage: torch.UntypedStorage, device: object = None, non_blocking: bool = False) -> LazyStorage:
    """Return a copy of a CPU storage on the device: ``storage.tpu()``."""
    return storage if isinstance(storage, LazyStorage) else _of_host(storage.clone())


# --- other processes ----------------------------------------------------------------------------------------------


def _send(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.requires_grad and not tensor.is_leaf:
        raise RuntimeError(
            "Cowardly refusing to serialize non-leaf tensor which requires_grad, "
            "since autograd does not support crossing process boundaries.  "
            "If you just want to transfer the data, call detach() on the tensor before serializing "
            "(e.g., putting it on the queue)."
        )
    return _receive, (tensor.detach().cpu(), tensor.requires_grad, isinstance(tensor, torch.nn.Parameter))


def _receive(host: torch.Tensor, requires_grad: bool, is_parameter: bool) -> torch.Tensor:
    """Make a device tensor of what `_send` put into shared memory."""
    tensor = host.to(LazyTensor.device_type)
    return torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)


# --- plain tensors ------------------------------------------------------------------------------------------------


def _cover(
    name: str, ours: Callable[..., object], layouts: Container[torch.layout] = (torch.strided,), of_users: bool = True
) -> None:
    """Make a method of ``torch.Tensor`` safe for device tensors that C++ made and no kernel has seen, and for
    those of users' classes: torch's own would look for their contents in C++ memory."""
    theirs = getattr(torch.Tensor, name)

    @functools.wraps(theirs)
    def method(self: torch.Tensor, *args: object, **kwargs: object) -> object:
        if (of_users or type(self) is torch.Tensor) and _is_unseen(self) and self.layout in layouts:
            return ours(lazy(self), *args, **kwargs)
        return theirs(self, *args, **kwargs)

    setattr(torch.Tensor, name, method)


def _is_unseen(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is ours but not of our class: made by C++, or of a user's class, whose own
    ``__torch_function__`` comes first.  What stands for other tensors, as those of torch.func do, is neither."""
    return (
        type(tensor) is not LazyTensor
        and tensor.device.type == LazyTensor.device_type
        and type(tensor).__torch_dispatch__ is _PLAIN
        and not torch.overrides.has_torch_function_unary(tensor)
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and not torch._is_functional_tensor(tensor)
    )


def _alias(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor of our class in the memory of a dense one of a user's class."""
    if type(tensor) in (LazyTensor, torch.Tensor):
        return None
    return lazy(torch.Tensor.detach(tensor))


def _to_dlpack(tensor: torch.Tensor) -> object:
    """``torch.utils.dlpack.to_dlpack``, which would look for the contents of a device tensor in C++ memory."""
    if tensor.device.type == LazyTensor.device_type:
        return lazy(tensor).__dlpack__()
    return torch._C._to_dlpack(tensor)


_is_plain_storage = torch.is_storage


def _is_storage(obj: object, /) -> bool:
    """``torch.is_storage``, by which torch.save knows what to write as contents; it compares types."""
    return type(obj) is LazyStorage or _is_plain_storage(obj)


def register() -> None:
    """Teach torch and multiprocessing to save, load, copy and send device tensors."""
    LazyTensor.storage_class = LazyStorage
    LazyStorage.__name__ = torch.UntypedStorage.__name__  # under which torch saves it
    vars(torch)["is_storage"] = _is_storage
    setattr(torch.UntypedStorage, copy_.__name__, copy_)
    setattr(torch.UntypedStorage, LazyTensor.device_type, to_storage)
    torch.serialization.register_package(9, _location, _restore)
    ForkingPickler.register(LazyTensor, _send)
    vars(torch)["to_dlpack"] = vars(torch.utils.dlpack)["to_dlpack"] = _to_dlpack
    _cover("__deepcopy__", lambda tensor, memo: deepcopy_tensor(tensor, memo, _alias(tensor)))
    sparse = (torch.strided, torch.sparse_coo, torch.sparse_csr, torch.sparse_csc)
    _cover("__reduce_ex__", lambda tensor, protocol: reduce_tensor(tensor, _alias(tensor)), sparse)
    _cover("data_ptr", LazyTensor.data_ptr)
    _cover("__repr__", lambda tensor, **_: represent(tensor), sparse, of_users=False)
