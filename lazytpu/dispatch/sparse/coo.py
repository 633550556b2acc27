"""Kernels of COO tensors that make them, look at their parts, copy them, or move values."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

from lazytpu.dispatch.sparse.parts import (
    COO,
    META,
    coo,
    flat_indices,
    indices_of,
    kernel,
    sparse_size,
    values_of,
    with_values,
)
from lazytpu.dispatch.sparse.positions import coalesced, gather, moving, numbered
from lazytpu.errors import UnsupportedOpError
from lazytpu.ir.op_schema import OpOverload, aten
from lazytpu.tensors.tensor import lazy

# What torch's C++ answers from sizes, or by giving a part of the tensor.
LOOKING: tuple[OpOverload, ...] = (
    aten._sparse_coo_tensor_with_dims.default,
    aten._sparse_coo_tensor_with_dims_and_tensors.default,
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.zero_.default,
    aten.zeros.out,
    aten.sparse_resize_.default,
    aten.sparse_resize_and_clear_.default,
    aten.sparse_dim.default,
    aten._dimI.default,
    aten.dense_dim.default,
    aten._dimV.default,
    aten._nnz.default,
    aten.is_coalesced.default,
    aten._coalesced_.default,
    aten._indices.default,
    aten._values.default,
    aten.indices.default,
    aten.values.default,
    aten.copy_sparse_to_sparse_.default,
)
_ALSO = {"_dimI": "sparse_dim", "_dimV": "dense_dim"}

# What only moves values.
MOVING: tuple[OpOverload, ...] = (
    aten.permute.default,
    aten.unsqueeze.default,
    aten.index_select.default,
    aten.narrow_copy.default,
    aten.cat.default,
    aten._sparse_broadcast_to.default,
)


def looking(overload: OpOverload, key: torch._C.DispatchKeySet) -> Callable[..., object]:
    """Return the kernel of an op that torch's C++ answers for any device."""
    name = _ALSO.get(overload._schema.name.removeprefix("aten::"))
    target = getattr(aten, name).default if name else overload

    def look(*args: object, **kwargs: object) -> object:
        found = target.redispatch(key, *args, **kwargs)
        return lazy(found) if isinstance(found, Tensor) and found.layout is torch.strided else found

    return look


def register_tables() -> None:
    """Make the kernels of `LOOKING` and `MOVING`."""
    for overload in LOOKING:
        kernel(overload.name().removeprefix("aten::"))(looking(overload, META))
    for overload in MOVING:
        kernel(overload.name().removeprefix("aten::"))(moving(overload))


@kernel("_coalesce")
def coalesce(x: Tensor) -> Tensor:
    return coalesced(x)


@kernel("clone")
def clone(x: Tensor, *, memory_format: torch.memory_format | None = None) -> Tensor:
    return with_values(x, values_of(x).clone())


@kernel("is_pinned")
def is_pinned(x: Tensor, device: object = None) -> bool:
    return False


@kernel("copy_")
def copy_(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Give a COO tensor the parts of another one, on whichever device either is."""
    if not x.layout is source.layout is COO:
        raise RuntimeError(
            "copy_() between dense and sparse Tensors is not implemented! "
            f"Found self type = {x.type()} and src type = {source.type()}"
        )
    if x.shape != source.shape:
        source = aten._sparse_broadcast_to.default(source, x.shape)
    return assign(x, source)


def assign(x: Tensor, source: Tensor) -> Tensor:
    """Make ``x`` the COO tensor that ``source`` is, with its own dtype."""
    aten.copy_sparse_to_sparse_.default.redispatch(META, x, source)
    return x


@kernel("resize_as_sparse_")
def resize_as_sparse_(x: Tensor, template: Tensor) -> Tensor:
    if x.shape != template.shape or x.sparse_dim() != template.sparse_dim():
        aten.sparse_resize_and_clear_.default(x, template.shape, template.sparse_dim(), template.dense_dim())
    return x


@kernel("sparse_mask")
def sparse_mask(x: Tensor, mask: Tensor) -> Tensor:
    """Take the values of ``x`` where a COO tensor has some."""
    if x.shape != mask.shape:
        raise RuntimeError(
            f"sparse_mask(): operands have incompatible sizes; self has size {list(x.shape)} "
            f"but mask has size {list(mask.shape)}"
        )
    if x.layout is COO:
        x = coalesced(x)
        made = numbered(x, "indices for sparse_mask").sparse_mask(numbered(mask, "indices of a mask"))
        return with_values(mask, gather(values_of(x).reshape(-1), made._values()))
    if x.layout is not torch.strided:
        raise UnsupportedOpError(f"sparse_mask of {x.layout}", fix="convert it first, with to_sparse()")
    return with_values(mask, values_at(x, mask))


def values_at(x: Tensor, mask: Tensor) -> Tensor:
    """Return the values of a dense tensor at the places of a COO tensor of its sizes, [n, *dense]."""
    size = sparse_size(mask)
    flat = flat_indices(indices_of(mask), size)
    return x.reshape(prod(size), *mask.shape[len(size) :]).index_select(0, flat)


@kernel("_sparse_mask_projection")
def sparse_mask_projection(x: Tensor, mask: Tensor, accumulate_matches: bool = False) -> Tensor:
    """Keep the indices of ``x``; its values where the mask has none become zero."""
    found = values_of(sparse_mask(with_values(mask, torch.ones_like(values_of(mask))), x))
    return with_values(x, values_of(x) * (found if accumulate_matches else found != 0))


def like(x: Tensor, values: Tensor) -> Tensor:
    """Return a COO tensor at the places of ``x``, which it shares, with other values."""
    return coo(indices_of(x), values, x.shape, x.is_coalesced())
