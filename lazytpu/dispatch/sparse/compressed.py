"""Kernels of CSR and CSC tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lazytpu.dispatch.sparse.conversions import to_sparse, to_sparse_csr
from lazytpu.dispatch.sparse.coo import looking
from lazytpu.dispatch.sparse.parts import (
    COO,
    CSR,
    META_COMPRESSED,
    add_up,
    compressed,
    compressed_of,
    for_compressed,
    kernel,
    pairs_of,
    sparse_first,
    values_of,
    with_values,
)
from lazytpu.dispatch.sparse.pointwise import FUNCTIONS
from lazytpu.errors import UnsupportedOpError
from lazytpu.ir.op_schema import overload_named

_HERE = (for_compressed,)

# What torch's C++ answers from sizes, or by computing with the values, for any device.
LOOKING = (
    "crow_indices col_indices ccol_indices row_indices values _nnz sparse_dim dense_dim empty.memory_format empty_like "
    "zero_ clone resize_as_sparse_ neg neg_ mul.Scalar mul_.Scalar angle conj_physical_ _conj_physical "
    "threshold_backward select.int fill_.Scalar"
).split()


def register_tables() -> None:
    """Make the kernels of `LOOKING` and of functions of the values."""
    names = [*LOOKING, *(n for n in FUNCTIONS if n != "nan_to_num")]
    for name in names:
        for each in (name, f"{name}_") if name in FUNCTIONS else (name,):
            overload = overload_named(each)
            if overload is not None:
                kernel(each, keys=_HERE)(looking(overload, META_COMPRESSED))


@kernel("is_pinned", keys=_HERE)
def is_pinned(x: Tensor, device: object = None) -> bool:
    return False


@kernel("copy_", keys=_HERE)
def copy_(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy the parts of a tensor with as many values, on whichever device either is."""
    if x.layout is not source.layout:
        raise RuntimeError(
            f"copy_: copy of sparse compressed tensors having different layouts is not supported. self layout is "
            f"{_title(x)} and src layout is {_title(source)}"
        )
    if x._nnz() != source._nnz():
        raise RuntimeError(
            "copy_: only sparse compressed tensors with the same number of specified elements are supported."
        )
    for mine, theirs in zip(_all_parts(x), _all_parts(source), strict=True):
        mine.copy_(theirs)
    return x


def _title(x: Tensor) -> str:
    return {torch.strided: "Strided", COO: "Sparse", CSR: "SparseCsr"}.get(x.layout, "SparseCsc")


def _all_parts(x: Tensor) -> tuple[Tensor, ...]:
    if x.layout is CSR:
        return x.crow_indices(), x.col_indices(), x.values()
    return x.ccol_indices(), x.row_indices(), x.values()


@kernel("add.Tensor", keys=_HERE)
def add(a: Tensor, b: Tensor, *, alpha: complex = 1) -> Tensor:
    """Add a CSR tensor to a dense one, or two CSR tensors."""
    if a.layout is torch.strided:
        if a.shape != b.shape:
            raise RuntimeError(f"Expected input tensors to have the same shape, but got {a.shape} and {b.shape}")
        dtype = torch.result_type(a, b)
        rows, columns = pairs_of(b)
        values = values_of(b).to(dtype)
        total = a.to(dtype).clone(memory_format=torch.contiguous_format)
        total.view(-1).index_add_(0, rows * b.shape[1] + columns, values * alpha if alpha != 1 else values)
        return total
    if not a.layout is b.layout is CSR:
        raise UnsupportedOpError(f"a sum of {a.layout} and {b.layout}", fix="convert both to CSR or to COO")
    return to_sparse_csr(torch.add(to_sparse(a), to_sparse(b), alpha=alpha))


@kernel("add_.Tensor", keys=_HERE)
def add_(a: Tensor, b: Tensor, *, alpha: complex = 1) -> Tensor:
    return a.copy_(add(a, b, alpha=alpha))


@kernel("mul.Tensor", keys=_HERE)
def mul(a: Tensor | complex, b: Tensor | complex) -> Tensor:
    """Multiply values by a number, a dense matrix, or another CSR tensor."""
    a, b = sparse_first(a, b)
    if not isinstance(b, Tensor) or b.layout is torch.strided and b.dim() == 0:
        return with_values(a, values_of(a) * b)
    if b.layout is torch.strided:
        rows, columns = pairs_of(a)
        return with_values(a, values_of(a) * b.expand(a.shape)[rows, columns])
    if not a.layout is b.layout is CSR:
        raise UnsupportedOpError(f"a product of {a.layout} and {b.layout}", fix="convert both to CSR or to COO")
    return to_sparse_csr(to_sparse(a) * to_sparse(b))


@kernel("mul_.Tensor", keys=_HERE)
def mul_(a: Tensor, b: Tensor | complex) -> Tensor:
    return a.copy_(mul(a, b))


@kernel("sum", keys=_HERE)
def sum_(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    return values_of(x).sum(dtype=dtype)


@kernel("_sparse_csr_sum.dim_dtype", "sum.dim_IntList", keys=_HERE)
def sum_dims(
    x: Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Add up along one dim or both; torch gives a CSR tensor and wants the dim kept."""
    if not keepdim:
        raise RuntimeError("reduction operations on CSR tensors with keepdim=False is unsupported")
    dims = {d % 2 for d in dim or (0, 1)}
    values = values_of(x) if dtype is None else values_of(x).to(dtype)
    rows, columns = pairs_of(x)
    size = [1 if d in dims else n for d, n in enumerate(x.shape)]
    place = sum((i * s for i, s in ((rows, size[1]), (columns, 1)) if (0 if i is rows else 1) not in dims), rows * 0)
    return to_sparse_csr(add_up(place, values, size[0] * size[1]).view(size))


@kernel("sparse_mask", keys=_HERE)
def sparse_mask(x: Tensor, mask: Tensor) -> Tensor:
    """Take the values of a dense matrix where a CSR or CSC tensor has some."""
    if x.layout is not torch.strided:
        raise UnsupportedOpError(f"sparse_mask of {x.layout}", fix="convert it with to_dense() first")
    rows, columns = pairs_of(mask)
    return with_values(mask, x[rows, columns])


def transposed(x: Tensor) -> Tensor:
    """Return the transposition of a CSR tensor as a CSC tensor of the same parts, or the other way."""
    starts, plain = compressed_of(x)
    layout = torch.sparse_csc if x.layout is CSR else CSR
    return compressed(starts, plain, values_of(x), (x.shape[1], x.shape[0]), layout)
