"""Kernels from dense tensors to sparse ones and back."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from lazytpu.dispatch import handwritten
from lazytpu.dispatch.sparse.parts import (
    COO,
    CSC,
    CSR,
    add_up,
    compressed,
    compressed_of,
    coo,
    flat_indices,
    for_compressed,
    for_coo,
    indices_of,
    kernel,
    pairs_of,
    sparse_size,
    starts_of,
    to_device,
    values_of,
)
from lazytpu.dispatch.sparse.positions import coalesced, gather
from lazytpu.errors import UnsupportedOpError
from lazytpu.location import site
from lazytpu.tracing.reading import read
from lazytpu.tracing.record import is_device_tensor

_BOTH = (for_coo, for_compressed)
_NAMES = {torch.sparse_bsr: "BSR", torch.sparse_bsc: "BSC"}


@kernel("_to_dense")
def to_dense(x: Tensor, dtype: torch.dtype | None = None, masked_grad: bool | None = None) -> Tensor:
    """Add the values of a COO tensor up into zeros."""
    if dtype is not None:
        raise RuntimeError("dtype argument is not supported by sparse_to_dense")
    size = sparse_size(x)
    return add_up(flat_indices(indices_of(x), size), values_of(x), prod(size)).view(x.shape)


@kernel("_to_dense", keys=(for_compressed,))
def compressed_to_dense(x: Tensor, dtype: torch.dtype | None = None, masked_grad: bool | None = None) -> Tensor:
    """Add the values of a CSR or CSC tensor up into zeros."""
    if dtype is not None:
        raise RuntimeError("dtype argument is not supported by sparse_csr_to_dense")
    rows, columns = pairs_of(x)
    return add_up(rows * x.shape[1] + columns, values_of(x), x.numel()).view(x.shape)


@handwritten.kernel("_to_sparse", "_to_sparse.sparse_dim")
@kernel("_to_sparse", "_to_sparse.sparse_dim", keys=_BOTH)
def to_sparse(
    x: Tensor,
    sparse_dim: int | None = None,
    *,
    layout: torch.layout | None = None,
    blocksize: Sequence[int] | None = None,
    dense_dim: int | None = None,
) -> Tensor:
    """Convert to COO, or to the layout given; a dense tensor is read for where it is not zero."""
    if layout in (CSR, CSC):
        return _to_compressed(x, layout, dense_dim)
    if layout not in (None, COO):
        raise _out(layout)
    if x.layout is COO:
        if sparse_dim not in (None, x.sparse_dim()):
            raise _unsupported("a COO tensor to another number of dims with indices")
        return x
    if x.layout is not torch.strided:
        rows, columns = pairs_of(x)
        made = coo(torch.stack([rows, columns]), values_of(x), x.shape, x.layout is CSR)
        return made if x.layout is CSR else coalesced(made)
    count = x.dim() if sparse_dim is None else sparse_dim
    if count == 0 and x.dim() == 0:  # a number is one value without an index
        kept = x.reshape(1)[x.reshape(1) != 0]
        return coo(torch.zeros((0, kept.shape[0]), dtype=torch.int64, device=x.device), kept, x.shape, True)
    if not 0 < count <= x.dim():
        raise RuntimeError(
            f"sparse_dim must be > 0 and <= self.dim(), but got sparse_dim={count} and self.dim()={x.dim()}"
        )
    there = x != 0
    if count < x.dim():
        there = there.flatten(count).any(-1)
    indices = there.nonzero().t().contiguous()
    flat = flat_indices(indices, x.shape[:count])
    values = x.reshape(prod(x.shape[:count]), *x.shape[count:]).index_select(0, flat)
    return coo(indices, values, x.shape, True)


@handwritten.kernel("_to_sparse_csr")
@kernel("_to_sparse_csr", keys=_BOTH)
def to_sparse_csr(x: Tensor, dense_dim: int | None = None) -> Tensor:
    return _to_compressed(x, CSR, dense_dim)


@handwritten.kernel("_to_sparse_csc")
@kernel("_to_sparse_csc", keys=_BOTH)
def to_sparse_csc(x: Tensor, dense_dim: int | None = None) -> Tensor:
    return _to_compressed(x, CSC, dense_dim)


@handwritten.kernel("_to_sparse_bsr")
@kernel("_to_sparse_bsr", keys=_BOTH)
def to_sparse_bsr(x: Tensor, blocksize: Sequence[int], dense_dim: int | None = None) -> Tensor:
    raise _out(torch.sparse_bsr)


@handwritten.kernel("_to_sparse_bsc")
@kernel("_to_sparse_bsc", keys=_BOTH)
def to_sparse_bsc(x: Tensor, blocksize: Sequence[int], dense_dim: int | None = None) -> Tensor:
    raise _out(torch.sparse_bsc)


@handwritten.kernel("_spdiags")
def spdiags(diagonals: Tensor, offsets: Tensor, shape: Sequence[int], layout: torch.layout | None = None) -> Tensor:
    """Lay the rows of a matrix along diagonals of another one."""
    numbers = torch.arange(1, diagonals.numel() + 1, device="cpu").view(diagonals.shape)
    offsets = read(offsets, "offsets of diagonals") if is_device_tensor(offsets) else offsets
    made = torch.sparse.spdiags(numbers, offsets, list(shape))
    values = gather(diagonals.reshape(-1), made._values())
    found = coo(to_device(made._indices().contiguous()), values, made.shape, made.is_coalesced())
    return found if layout in (None, COO) else to_sparse(found, layout=layout)


def _to_compressed(x: Tensor, layout: torch.layout, dense_dim: int | None) -> Tensor:
    if x.layout is layout:
        starts, plain = compressed_of(x)
        return compressed(starts.clone(), plain.clone(), values_of(x).clone(), x.shape, layout)
    if x.dim() < 2 and x.layout is torch.strided:
        expected = "2 and 3" if x.dim() else "2"
        raise RuntimeError(
            f"dense_to_sparse_{'csr' if layout is CSR else 'csc'} expected a tensor with at least {expected[0]} "
            f"dimensions, got {x.dim()}-dimensional tensor."
        )
    if x.dim() != 2 or dense_dim:
        raise _unsupported("batches and dense dims of CSR and CSC tensors")
    if layout is CSC:
        return _transposed_csr(x)
    found = coalesced(x if x.layout is COO else to_sparse(x))
    rows, columns = indices_of(found).unbind(0)
    return compressed(starts_of(rows, x.shape[0]), columns.contiguous(), values_of(found).clone(), x.shape, layout)


def _transposed_csr(x: Tensor) -> Tensor:
    """Return a matrix as a CSC tensor, whose parts are those of its transposition's CSR tensor."""
    x = to_sparse(x) if x.layout is torch.strided else x
    rows, columns = pairs_of(x)
    turned = coalesced(coo(torch.stack([columns, rows]), values_of(x), (x.shape[1], x.shape[0]), False))
    found = _to_compressed(turned, CSR, None)
    starts, plain = compressed_of(found)
    return compressed(starts, plain, values_of(found), x.shape, CSC)


def _out(layout: torch.layout | None) -> UnsupportedOpError:
    return _unsupported(f"tensors of the layout {_NAMES.get(layout, layout) if layout else layout}")


def _unsupported(what: str) -> UnsupportedOpError:
    return UnsupportedOpError(
        f"{what}: the device has COO, CSR and CSC tensors without batches",
        at=site.here().describe(),
        fix="keep it dense, or on the CPU",
    )
