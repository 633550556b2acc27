"""The tensor class, and how tensors, C++ storages and cells find each other.

A device tensor is a real ``torch.Tensor`` whose C++ storage owns no bytes.  Our `Storage` is the
attribute ``_s`` of the Python object of that C++ storage, which lives as long as the C++ storage does, so
everything that aliases reaches it.  ``tensor._s`` is the tensor's own cell, a copy kept for speed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, cast

import torch

from lazytpu.errors import BackwardError, UnsupportedOpError
from lazytpu.tensors.copying import deepcopy_tensor, reduce_tensor
from lazytpu.tensors.layout import CONJ, NEG, Layout, geometry_of, root_layout
from lazytpu.tensors.printing import represent
from lazytpu.tensors.storage import Alias, Cell, Storage, cell_at, new_storage, resolve

_create: Any = torch._C._acc.create_empty_tensor
_META = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)
_as_strided = torch.ops.aten.as_strided.default._handle.redispatch_boxed
reinterpret: Any = vars(torch._C._dynamo.guards)["_reinterpret_tensor"]  # torch's stubs lack it
_set = torch.ops.aten.set_.source_Storage_storage_offset.redispatch
_conj, _neg_view = torch.ops.aten._conj.default.redispatch, torch.ops.aten._neg_view.default.redispatch
_in_inference_mode = torch.is_inference_mode_enabled
_Tensor: Any = torch.Tensor


rebinds = 0
"""How often a tensor was pointed at another storage (``x.data = y``); compiled steps depend on it."""


class _FindCell:
    """Finds the cell of a tensor that C++ made, and keeps it on the tensor.

    A non-data descriptor: it is asked only where the instance has no ``_s`` of its own.
    """

    def __get__(self, tensor: Any, owner: type) -> Any:
        return self if tensor is None else adopt(tensor)


_grad_of = _Tensor.grad.__get__
_dict_of: Any = torch.Tensor.__dict__["__dict__"]


class _AttributesOfUser:
    """``__dict__`` of a tensor, without its cell: what copies it to another tensor must not copy that.

    The tensor finds its cell again at its next use.
    """

    def __get__(self, tensor: torch.Tensor, owner: type) -> dict[str, object]:
        found: dict[str, object] = _dict_of.__get__(tensor)
        found.pop("_s", None)
        return found

    def __set__(self, tensor: torch.Tensor, value: dict[str, object]) -> None:
        _dict_of.__set__(tensor, {name: x for name, x in value.items() if name != "_s"})


class LazyTensor(torch.Tensor):
    """A tensor on the lazy device.

    C++ hands Python plain ``torch.Tensor`` objects where it makes tensors itself (``detach``, gradients,
    ``.data``); the overrides below give them this class.  A dispatcher kernel for ``detach`` would break
    FakeTensor and saved tensors.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _s = _FindCell()
    __dict__ = cast(dict[str, object], _AttributesOfUser())
    device_type: ClassVar[str] = "tpu"  # dispatch/registration.py sets the name in use
    storage_class: ClassVar[type] = torch.UntypedStorage  # saving.py puts one with contents here

    def detach(self) -> torch.Tensor:
        out: LazyTensor = _Tensor.detach(self)
        out.__class__ = LazyTensor
        out._s = self._s
        return out

    def backward(self, *args: object, **kwargs: object) -> None:
        try:
            _Tensor.backward(self, *args, **kwargs)
        except RuntimeError as error:
            if "device_ready_queues_" not in str(error):
                raise
            raise BackwardError(
                "torch's autograd does not know the device: the first backward pass of this process was before it",
                fix="import lazytpu before the first backward pass",
            ) from None

    @property
    def grad(self) -> torch.Tensor | None:
        grad = _grad_of(self)
        return grad if grad is None or type(grad) is LazyTensor else lazy(grad)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        _Tensor.grad.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        _Tensor.grad.__delete__(self)

    @property
    def data(self) -> torch.Tensor:
        return lazy(_Tensor.data.__get__(self))

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _dict_of.__get__(self).pop("_s", None)  # an interrupt before the end leaves a tensor that finds its cell again
        _Tensor.data.__set__(self, value)
        forget_cell(self)

    def numpy(self, *, force: bool = False) -> Any:
        if force:
            return self.detach().cpu().resolve_conj().resolve_neg().numpy()
        raise TypeError(
            f"can't convert {self.device} device type tensor to numpy. "
            "Use Tensor.cpu() to copy the tensor to host memory first."
        )

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return represent(self)

    def __format__(self, spec: str) -> str:
        return format(self.detach().item(), spec) if self.dim() == 0 else object.__format__(self, spec)

    def untyped_storage(self) -> Any:
        storage = _Tensor.untyped_storage(self)
        storage.__class__ = self.storage_class
        return storage

    def data_ptr(self) -> int:
        if not self.numel():
            return 0
        start: int = self.untyped_storage().data_ptr()
        return start + int(self.storage_offset()) * self.element_size()

    def __dlpack_device__(self) -> Any:
        return torch.empty(0, device="cpu").__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        """Return a copy on the host: nobody else may see, or write to, the buffers of the device."""
        return self.cpu().__dlpack__(**options)

    def __coerce_same_metadata_as_tangent__(self, metadata: object, expected: type | None = None) -> object:
        """Asked by AOTAutograd, which knows these tensors as plain ones."""
        return self if metadata is None else None

    def __deepcopy__(self, memo: dict[int, object]) -> torch.Tensor:
        return deepcopy_tensor(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return reduce_tensor(self)


def lazy(tensor: torch.Tensor) -> torch.Tensor:
    """Give a device tensor that C++ made its class; anything else is returned as it is."""
    if type(tensor) is _Tensor and tensor.device.type == LazyTensor.device_type and tensor.layout is torch.strided:
        tensor.__class__ = LazyTensor
    return tensor


class MixedDevicesError(RuntimeError):
    """A CPU tensor of rank > 0 met a device tensor, or is to be written with one."""

    def __init__(self, other: torch.device) -> None:
        device = f"{LazyTensor.device_type}:0"
        super().__init__(
            f"Expected all tensors to be on the same device, but found at least two devices, {device} and {other}!"
        )


def adopt(tensor: torch.Tensor) -> Cell:
    """Return the cell of a device tensor that has none yet.

    Raises:
        MixedDevicesError: the tensor is not on the device.
    """
    if tensor.device.type != LazyTensor.device_type:
        raise MixedDevicesError(tensor.device)
    try:
        storage = _Tensor.untyped_storage(tensor)
    except NotImplementedError:
        if tensor.layout is torch.strided:
            raise
        raise UnsupportedOpError(
            f"expected a dense tensor, but got one of layout {tensor.layout}",
            fix="give its values(), or convert it with to_dense()",
        ) from None
    size, stride = tuple(tensor.shape), tensor.stride()
    state: Storage | None = getattr(storage, "_s", None)
    if state is None:  # C++ made a storage without asking us (`set_()`, `resize_` from nothing)
        state = new_storage(root_layout(size, stride, tensor.dtype))
        storage._s = state
    layout = state.layout
    geometry = geometry_of(tensor)
    cell = cell_at(state, layout if geometry == layout.geometry else layout.child_at(geometry))
    if type(tensor) is _Tensor:
        tensor.__class__ = LazyTensor
    elif type(tensor) is torch.nn.Parameter:  # made of a plain tensor, or by a module such as LazyLinear
        tensor.__class__ = LazyTensor  # type: ignore[assignment]
        tensor._is_param = True  # torch's mark for parameters of other classes
    elif type(tensor) is not LazyTensor:  # of a user's class, whose attributes and `data` we do not see change
        return cell
    tensor._s = cell  # type: ignore[attr-defined]
    return cell


def forget_cell(tensor: torch.Tensor) -> None:
    """Make the tensor find its cell again: C++ pointed it at another storage."""
    global rebinds
    rebinds += 1
    _dict_of.__get__(tensor).pop("_s", None)


def make(storage: Storage) -> LazyTensor:
    """Return a new tensor that is all of a new storage."""
    layout = storage.layout
    tensor: LazyTensor = _create(layout.size, layout.dtype)
    if not layout.as_created:
        tensor = reinterpret(tensor, layout.size, layout.stride)
    tensor.untyped_storage()._s = storage
    tensor.__class__ = LazyTensor
    tensor._s = storage
    return tensor


def strided(tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], further: int) -> LazyTensor:
    """Return a tensor of torch's own class on the C++ storage of another, ``further`` elements behind its first.

    In a third of the time of ``as_strided``, which inference mode needs: it knows views of what was made outside.
    """
    found: LazyTensor = (
        _as_strided(_META, tensor, size, stride, tensor.storage_offset() + further)
        if _in_inference_mode()
        else reinterpret(tensor, size, stride, further)
    )
    return found


def make_view(tensor: torch.Tensor, storage: Storage, layout: Layout) -> LazyTensor:
    """Return a tensor that shares the C++ storage of ``tensor`` and lies in it as ``layout``."""
    out = strided(tensor, layout.size, layout.stride, layout.offset - int(tensor.storage_offset()))
    out.__class__ = LazyTensor
    out._s = storage if layout is storage.layout else Alias(storage, layout)
    return out


def view_at(tensor: LazyTensor, layout: Layout) -> LazyTensor:
    """Return a tensor in the storage of another, where ``layout`` says, whatever its dtype and lazy bits."""
    storage, own = resolve(tensor._s)
    if (layout.dtype, layout.bits) == (own.dtype, own.bits):
        return make_view(tensor, storage, layout)
    out: LazyTensor = _create((0,), layout.dtype)
    _set(_META, out, _Tensor.untyped_storage(tensor), layout.offset, layout.size, layout.stride)
    out = _conj(_META, out) if layout.bits & CONJ else out
    out = _neg_view(_META, out) if layout.bits & NEG else out
    out.__class__ = LazyTensor
    out._s = cell_at(storage, layout)
    return out
