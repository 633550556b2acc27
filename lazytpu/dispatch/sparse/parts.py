"""Take sparse tensors apart and make them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from lazytpu.ir.op_schema import aten
from lazytpu.ir.types import contiguous_stride
from lazytpu.tensors.tensor import LazyTensor, lazy
from lazytpu.tracing.reading import read
from lazytpu.tracing.record import is_device_tensor

_Kernel = TypeVar("_Kernel", bound=Callable[..., object])
COO, CSR, CSC = torch.sparse_coo, torch.sparse_csr, torch.sparse_csc

META = torch._C.DispatchKeySet(torch._C.DispatchKey.SparseMeta)
"""Leads to torch's kernels that look at no value; they serve any device."""
META_COMPRESSED = torch._C.DispatchKeySet(torch._C.DispatchKey.SparseCsrMeta)

for_coo: dict[str, Callable[..., object]] = {}
for_compressed: dict[str, Callable[..., object]] = {}
"""Overload (``add.Tensor``) to its kernel, of each of torch's two keys."""

_MAKE = aten._sparse_coo_tensor_with_dims_and_tensors.default
_INDICES, _VALUES = aten._indices.default, aten._values.default
_PARTS = {
    CSR: (aten.crow_indices.default, aten.col_indices.default),
    CSC: (aten.ccol_indices.default, aten.row_indices.default),
}
_COMPRESSED_VALUES = aten.values.default


def kernel(
    *names: str, keys: tuple[dict[str, Callable[..., object]], ...] = (for_coo,)
) -> Callable[[_Kernel], _Kernel]:
    """Register a kernel for the named overloads."""

    def register(function: _Kernel) -> _Kernel:
        for key in keys:
            key.update(dict.fromkeys(names, function))
        return function

    return register


def indices_of(x: Tensor) -> Tensor:
    """Return the indices of a COO tensor, i64[sparse dims, n]."""
    return lazy(_INDICES.redispatch(META, x)) if is_device_tensor(x) else x._indices()


def values_of(x: Tensor) -> Tensor:
    """Return the values of a sparse tensor, [n, *sizes of dense dims]."""
    if not is_device_tensor(x):
        return x._values() if x.layout is COO else x.values()
    if x.layout is COO:
        return lazy(_VALUES.redispatch(META, x))
    return lazy(_COMPRESSED_VALUES.redispatch(META_COMPRESSED, x))


def compressed_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the compressed and the plain indices of a CSR or CSC tensor."""
    starts, plain = _PARTS[x.layout]
    return lazy(starts.redispatch(META_COMPRESSED, x)), lazy(plain.redispatch(META_COMPRESSED, x))


def host_indices(x: Tensor, reason: str) -> Tensor:
    """Return the indices of a COO tensor as a CPU tensor, which waits for them."""
    indices = indices_of(x)
    return read(indices, reason) if is_device_tensor(indices) else indices


def coo(indices: Tensor, values: Tensor, size: Sequence[int], coalesced: bool) -> Tensor:
    """Return a COO tensor that holds the given indices and values themselves."""
    count, dense = indices.shape[0], values.dim() - 1
    options = {"dtype": values.dtype, "layout": COO, "device": values.device}
    made: Tensor = _MAKE.redispatch(META, count, dense, size, indices, values, is_coalesced=coalesced, **options)
    return made


def compressed(starts: Tensor, plain: Tensor, values: Tensor, size: Sequence[int], layout: torch.layout) -> Tensor:
    """Return a CSR or CSC tensor that holds the given indices and values themselves."""
    options = {"dtype": values.dtype, "layout": layout, "device": values.device}
    made: Tensor = aten._sparse_compressed_tensor_unsafe.default.decompose(starts, plain, values, size, **options)
    return made


def with_values(x: Tensor, values: Tensor, coalesced: bool | None = None) -> Tensor:
    """Return a sparse tensor with the indices of ``x``, copied, and other values."""
    if x.layout is COO:
        return coo(indices_of(x).clone(), values, x.shape, x.is_coalesced() if coalesced is None else coalesced)
    starts, plain = compressed_of(x)
    return compressed(starts.clone(), plain.clone(), values, x.shape, x.layout)


def sparse_first(a: Tensor | complex, b: Tensor | complex) -> tuple[Tensor, Tensor | complex]:
    """Return the operands of a product, one that is sparse before one that may be dense or a number."""
    if not isinstance(a, Tensor) or isinstance(b, Tensor) and a.layout is torch.strided:
        a, b = b, a
    assert isinstance(a, Tensor)
    return a, b


def rows_of(starts: Tensor, count: int) -> Tensor:
    """Return the row of each of ``count`` values whose rows begin at ``starts``, i64[rows + 1]."""
    every = torch.arange(count, device=starts.device, dtype=starts.dtype)
    return torch.searchsorted(starts, every, right=True).to(starts.dtype) - 1


def starts_of(rows: Tensor, count: int) -> Tensor:
    """Return where each of ``count`` rows begins among sorted ``rows``, i64[count + 1]."""
    return torch.searchsorted(rows.contiguous(), torch.arange(count + 1, device=rows.device, dtype=rows.dtype))


def pairs_of(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return row and column of each value of a sparse matrix."""
    if x.layout is COO:
        rows, columns = indices_of(x).unbind(0)
        return rows, columns
    starts, plain = compressed_of(x)
    slow = rows_of(starts, plain.shape[-1])
    return (slow, plain) if x.layout is CSR else (plain, slow)


def flat_indices(indices: Tensor, size: Sequence[int]) -> Tensor:
    """Return indices [dims, n] as positions in a contiguous tensor of that size, i64[n]."""
    flat = torch.zeros(indices.shape[1], dtype=torch.int64, device=indices.device)
    for index, stride in zip(indices.unbind(0), contiguous_stride(size), strict=False):
        flat = flat + index * stride
    return flat


def sparse_size(x: Tensor) -> tuple[int, ...]:
    """Return the sizes of the dims of a COO tensor that have indices."""
    return tuple(x.shape[: x.sparse_dim()])


def add_up(positions: Tensor, values: Tensor, count: int) -> Tensor:
    """Return ``count`` sums [count, *dense] of the values [n, *dense] that go to each position."""
    zeros = torch.zeros((count, *values.shape[1:]), dtype=values.dtype, device=values.device)
    if values.dtype is torch.bool:
        return zeros.to(torch.uint8).index_add_(0, positions, values.to(torch.uint8)).bool()
    return zeros.index_add_(0, positions, values)


def to_device(host: Tensor) -> Tensor:
    """Return a CPU tensor on the device."""
    return host.to(LazyTensor.device_type)
