"""The tensor class, and how tensors, C++ storages and cells find each other.

A device tensor is a real ``torch.Tensor`` whose C++ storage owns no bytes.  Our `Storage` is the
attribute ``_s`` of the Python object of that C++ storage, which lives as long as the C++ storage does, so
everything that aliases reaches it.  ``tensor._s`` is the tensor's own cell, a copy kept for speed.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from lazytpu.ir.layout import Layout, root_layout
from lazytpu.storage import Alias, Cell, Storage, cell_at, new_storage

_create = torch._C._acc.create_empty_tensor
_META = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)
_as_strided = torch.ops.aten.as_strided.default._handle.redispatch_boxed
_Tensor = torch.Tensor


class _FindCell:
    """Finds the cell of a tensor that C++ made, and keeps it on the tensor.

    A non-data descriptor: it is asked only where the instance has no ``_s`` of its own.
    """

    def __get__(self, tensor: Any, owner: type) -> Any:
        return self if tensor is None else adopt(tensor)


class LazyTensor(torch.Tensor):
    """A tensor on the lazy device.

    C++ hands Python plain ``torch.Tensor`` objects where it makes tensors itself (``detach``, gradients,
    ``.data``); the overrides below give them this class.  A dispatcher kernel for ``detach`` would break
    FakeTensor and saved tensors.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl
    _s = _FindCell()

    def detach(self) -> torch.Tensor:
        out = _Tensor.detach(self)
        out.__class__ = LazyTensor
        out._s = self._s
        return out

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        return lazy(_Tensor.grad.__get__(self))  # type: ignore[attr-defined]

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        _Tensor.grad.__set__(self, value)  # type: ignore[attr-defined]

    @grad.deleter
    def grad(self) -> None:
        _Tensor.grad.__delete__(self)  # type: ignore[attr-defined]

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        return lazy(_Tensor.data.__get__(self))  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        forget_cell(self)

    def numpy(self, *, force: bool = False) -> Any:
        if force:
            return self.detach().cpu().resolve_conj().resolve_neg().numpy()
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. "
            "Use Tensor.cpu() to copy the tensor to host memory first."
        )

    def __repr__(self, *, tensor_contents: str | None = None) -> str:
        return represent(self)

    def __format__(self, spec: str) -> str:
        return format(self.detach().item(), spec) if self.dim() == 0 else object.__format__(self, spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        if not self.is_leaf:
            return _Tensor.__deepcopy__(self, memo)  # type: ignore[no-any-return] # raises torch's own message
        with torch.no_grad():
            out = _copy_aliasing(self, memo)
        if isinstance(self, torch.nn.Parameter):
            out = torch.nn.Parameter(out, requires_grad=self.requires_grad)
        else:
            out.requires_grad_(self.requires_grad)
        memo[id(self)] = out
        if self.grad is not None:
            out.grad = copy.deepcopy(self.grad, memo)
        for name, value in self.__dict__.items():
            if name != "_s" and name not in out.__dict__:
                out.__dict__[name] = copy.deepcopy(value, memo)
        return out

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduce_tensor(self, protocol)


def lazy(tensor: Any) -> Any:
    """Gives a device tensor that C++ made its class; anything else is returned as it is."""
    if type(tensor) is _Tensor and tensor.device.type == LazyTensor.device_type:
        tensor.__class__ = LazyTensor
    return tensor


LazyTensor.device_type = "tpu"  # type: ignore[attr-defined] # device.py sets the name in use


def adopt(tensor: torch.Tensor) -> Cell:
    """The cell of a device tensor that has none yet."""
    storage = tensor.untyped_storage()
    size, stride = tuple(tensor.shape), tensor.stride()
    state: Storage | None = getattr(storage, "_s", None)
    if state is None:  # C++ made a storage without asking us (`set_()`, `resize_` from nothing)
        state = new_storage(root_layout(size, stride, tensor.dtype))
        storage._s = state  # type: ignore[attr-defined]
    layout = state.layout
    geometry = (size, stride, tensor.storage_offset(), tensor.dtype, tensor.is_conj() + 2 * tensor.is_neg())
    cell = cell_at(state, layout if geometry == layout.geometry else layout.child_at(geometry))
    tensor._s = cell  # type: ignore[attr-defined]
    if type(tensor) is _Tensor:
        tensor.__class__ = LazyTensor
    return cell


def forget_cell(tensor: torch.Tensor) -> None:
    """Makes the tensor find its cell again: C++ pointed it at another storage."""
    tensor.__dict__.pop("_s", None)


def make(storage: Storage) -> LazyTensor:
    """A new tensor that is all of a new storage."""
    layout = storage.layout
    tensor = _create(layout.size, layout.dtype)
    if not layout.contiguous:
        tensor = _as_strided(_META, tensor, layout.size, layout.stride, 0)
    tensor.untyped_storage()._s = storage
    tensor.__class__ = LazyTensor
    tensor._s = storage
    return tensor  # type: ignore[no-any-return]


def make_view(tensor: torch.Tensor, storage: Storage, layout: Layout) -> LazyTensor:
    """A tensor that shares the C++ storage of ``tensor`` and lies in it as ``layout``."""
    out = _as_strided(_META, tensor, layout.size, layout.stride, layout.offset)
    out.__class__ = LazyTensor
    out._s = storage if layout is storage.layout else Alias(storage, layout)
    return out  # type: ignore[no-any-return]


def _copy_aliasing(tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """A copy of ``tensor`` whose storage is copied once for all tensors in ``memo`` that share it."""
    storage = tensor.untyped_storage()
    base = memo.get(id(storage))
    if base is None:
        whole = tensor._s.storage if isinstance(tensor._s, Alias) else tensor._s  # type: ignore[attr-defined]
        flat = torch.as_strided(tensor.detach(), *whole.layout.geometry[:3])
        base = memo[id(storage)] = flat.clone()
        memo.setdefault(id(memo), []).append(storage)  # keeps the id taken
    return base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())  # type: ignore[no-any-return]


def represent(tensor: torch.Tensor) -> str:
    """What ``print`` shows: torch's own formatting of the values, with the device."""
    from torch import _tensor_str as fmt

    with torch.no_grad(), torch._C.DisableTorchFunction():
        plain = tensor.detach()
        prefix = "Parameter containing:\n" if isinstance(tensor, torch.nn.Parameter) else ""
        suffixes = [f"device='{tensor.device}'"]
        default = {torch.get_default_dtype(), torch.int64, torch.bool, torch.complex64}
        if torch.get_default_dtype() == torch.float64:
            default = (default - {torch.complex64}) | {torch.complex128}
        if tensor.numel() == 0:
            body = "[]"
            if tensor.dim() != 1:
                suffixes.append(f"size={tuple(tensor.shape)}")
            if tensor.dtype != torch.get_default_dtype():
                suffixes.append(f"dtype={tensor.dtype}")
        else:
            if tensor.dtype not in default:
                suffixes.append(f"dtype={tensor.dtype}")
            body = fmt._tensor_str(plain.cpu(), len("tensor("))
        grad_fn = tensor.grad_fn
    if grad_fn is not None:
        suffixes.append(f"grad_fn=<{type(grad_fn).__name__}>")
    elif tensor.requires_grad:
        suffixes.append("requires_grad=True")
    return prefix + fmt._add_suffixes("tensor(" + body, suffixes, len("tensor("), force_newline=False)


def reduce_tensor(tensor: LazyTensor, protocol: Any) -> Any:
    """How a tensor is pickled; saving.py replaces it with a form that keeps aliases."""
    raise NotImplementedError
