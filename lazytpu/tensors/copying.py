"""``copy.deepcopy`` and pickling of device tensors.

Both go through the Python object of the tensor's C++ storage (saving.LazyStorage), so what aliases stays
aliased and a file looks like one that was saved on any other accelerator.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch.utils.hooks import warn_if_has_hooks


def deepcopy_tensor(tensor: torch.Tensor, memo: dict[int, Any], alias: torch.Tensor | None = None) -> torch.Tensor:
    """Return a copy of a device tensor; tensors of one deepcopy that share memory share the copy of it.

    As in torch, a Parameter is copied alone, without gradient and attributes.

    Args:
        alias: a tensor of our class in the same memory, where the tensor is of a user's class.

    Raises:
        RuntimeError: the tensor is not a leaf; torch's message.
    """
    if id(tensor) in memo:
        found: torch.Tensor = memo[id(tensor)]
        return found
    if not tensor.is_leaf:
        return torch.Tensor.__deepcopy__(tensor, memo)  # type: ignore[no-any-return,no-untyped-call] # raises
    if isinstance(tensor, torch.nn.Parameter):
        whole = tensor.nbytes == tensor.untyped_storage().nbytes()
        data = _copy(tensor.data, {}).data if whole else tensor.data.clone()
        memo[id(tensor)] = parameter = torch.nn.Parameter(data, tensor.requires_grad)
        return parameter
    out = _copy(tensor, memo) if alias is None else _as_class_of(tensor, _copy(alias, memo))
    out.requires_grad_(tensor.requires_grad)
    if tensor.grad is not None:
        out.grad = copy.deepcopy(tensor.grad, memo)
    for name, value in attributes_of(tensor).items():
        setattr(out, name, copy.deepcopy(value, memo))
    memo[id(tensor)] = out
    return out


def _as_class_of(tensor: torch.Tensor, copied: torch.Tensor) -> torch.Tensor:
    """Return a copy as a tensor of a user's class, which torch asks for by ``new_empty``.

    Raises:
        RuntimeError: ``new_empty`` gives another class; torch's message.
    """
    out = tensor.new_empty([])
    if type(out) is not type(tensor):
        torch.empty(1, device="cpu").as_subclass(type(tensor)).__deepcopy__({})  # raises
    out.data = copied
    return out


def _copy(tensor: torch.Tensor, memo: dict[int, object]) -> torch.Tensor:
    with torch.no_grad():
        storage = copy.deepcopy(tensor.untyped_storage(), memo)
        out = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        out.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
        if tensor.is_conj():
            out = out.conj_physical()
        return out.neg() if tensor.is_neg() else out


def reduce_tensor(tensor: torch.Tensor, alias: torch.Tensor | None = None) -> tuple[object, ...]:
    """Return what pickle and ``torch.save`` keep of a device tensor: what they keep of one on the CPU, with the
    device as the location of its storage.  ``torch.load`` needs lazytpu only to bring it back here.

    Args:
        alias: a tensor of our class in the same memory, where the tensor is of a user's class.
    """
    if tensor.layout is not torch.strided:
        return _reduce_sparse(tensor)
    state = attributes_of(tensor)
    if isinstance(tensor, torch.nn.Parameter):
        args: tuple[Any, ...] = (tensor.data, tensor.requires_grad, OrderedDict())
        if state:
            return torch._utils._rebuild_parameter_with_state, (*args, state)
        return torch._utils._rebuild_parameter, args
    warn_if_has_hooks(tensor)
    typed = tensor.dtype not in torch.storage._new_dtypes()
    storage: Any = (tensor if alias is None else alias).untyped_storage()
    if typed:
        storage = torch.storage.TypedStorage(wrap_storage=storage, dtype=tensor.dtype, _internal=True)
    else:  # torch takes only its own class of untyped storage here
        storage, location = storage.cpu(), str(tensor.device)
        storage.lazytpu_location = location
    parts: tuple[Any, ...] = (
        storage,
        tensor.storage_offset(),
        tuple(tensor.shape),
        tensor.stride(),
        tensor.requires_grad,
        OrderedDict(),
    )
    if not typed:
        parts += (tensor.dtype,)
    metadata = torch._utils.get_tensor_metadata(tensor)
    if metadata:
        parts += (metadata,)
    rebuild = torch._utils._rebuild_tensor_v2 if typed else torch._utils._rebuild_tensor_v3
    if state or alias is not None:
        kind = torch.Tensor if alias is None else type(tensor)
        return torch._tensor._rebuild_from_type_v2, (rebuild, kind, parts, state)
    return rebuild, parts


def _reduce_sparse(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return what torch keeps of a sparse tensor: its parts, each as it is kept by itself."""
    if tensor.layout is torch.sparse_coo:
        parts: tuple[object, ...] = (tensor._indices(), tensor._values(), tensor.size(), tensor.is_coalesced())
    elif tensor.layout is torch.sparse_csr:
        parts = (tensor.crow_indices(), tensor.col_indices(), tensor.values(), tensor.size())
    else:
        parts = (tensor.ccol_indices(), tensor.row_indices(), tensor.values(), tensor.size())
    return torch._utils._rebuild_sparse_tensor, (tensor.layout, parts)


def attributes_of(tensor: torch.Tensor) -> dict[str, object]:
    """Return the attributes that the user has set on a tensor."""
    return {name: value for name, value in tensor.__dict__.items() if name != "_is_param"}  # which is torch's
