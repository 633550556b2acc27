"""Kernels of products of sparse matrices: gathered rows, added up by the row they go to."""

from __future__ import annotations

import torch
from torch import Tensor

from lazytpu.dispatch.sparse.conversions import to_sparse_csr
from lazytpu.dispatch.sparse.parts import (
    COO,
    CSR,
    add_up,
    compressed,
    coo,
    flat_indices,
    for_compressed,
    for_coo,
    host_indices,
    indices_of,
    kernel,
    pairs_of,
    starts_of,
    to_device,
    values_of,
    with_values,
)
from lazytpu.dispatch.sparse.positions import coalesced
from lazytpu.errors import UnsupportedOpError
from lazytpu.ir.op_schema import aten
from lazytpu.tracing.reading import read

_BOTH = (for_coo, for_compressed)


def _times_dense(a: Tensor, b: Tensor) -> Tensor:
    """Return the product of a sparse matrix [m, k] and a dense one [k, n]."""
    rows, columns = pairs_of(a)
    return add_up(rows, values_of(a).unsqueeze(-1) * b.index_select(0, columns), a.shape[0])


def _dense_times(a: Tensor, b: Tensor) -> Tensor:
    """Return the product of a dense matrix [m, k] and a sparse one [k, n]."""
    rows, columns = pairs_of(b)
    return add_up(columns, values_of(b).unsqueeze(-1) * a.t().index_select(0, rows), b.shape[1]).t().contiguous()


@kernel("addmm", keys=_BOTH)
def addmm(x: Tensor, a: Tensor, b: Tensor, *, beta: complex = 1, alpha: complex = 1) -> Tensor:
    """Compute ``beta * x + alpha * (a @ b)``, of a sparse and a dense matrix."""
    fits = a.dim() == b.dim() == 2 and a.shape[1] == b.shape[0] and x.dtype == a.dtype == b.dtype
    fits = fits and x.layout is torch.strided and x.dim() <= 2
    if not fits or (a.layout is torch.strided) == (b.layout is torch.strided):
        _raise_as_on_the_cpu(x, a, b)
    product = _dense_times(a, b) if a.layout is torch.strided else _times_dense(a, b)
    product = product * alpha if alpha != 1 else product
    if beta == 0:
        return product
    return (x * beta if beta != 1 else x).expand(product.shape) + product


def _raise_as_on_the_cpu(x: Tensor, a: Tensor, b: Tensor) -> None:
    """Raise what the CPU raises of tensors without a value."""

    def sample(t: Tensor) -> Tensor:
        if t.layout is torch.strided:
            return torch.zeros((), dtype=t.dtype, device="cpu").expand(t.shape)
        one = int(t.numel() > 0)
        places = torch.zeros((t.dim(), one), dtype=torch.int64, device="cpu")
        sparse = torch.sparse_coo_tensor(places, torch.zeros(one, dtype=t.dtype, device="cpu"), t.shape)
        return sparse if t.layout is COO or t.dim() != 2 else sparse.to_sparse(layout=t.layout)

    torch.addmm(*(sample(t) for t in (x, a, b)))
    raise UnsupportedOpError(
        f"a product of {a.layout} and {b.layout} with a sum of {x.layout}", fix="convert one of them with to_dense()"
    )


@kernel("mm")
def mm(a: Tensor, b: Tensor) -> Tensor:
    """Torch's own composition; it turns to `addmm`, or to the product of two sparse matrices."""
    found: Tensor = aten._sparse_mm.default.decompose(a, b)
    return found


@kernel("mm", keys=(for_compressed,))
def compressed_mm(a: Tensor, b: Tensor) -> Tensor:
    if a.layout is not torch.strided and b.layout is not torch.strided:
        return _sparse_times(to_sparse_csr(a), to_sparse_csr(b))
    dense = a if a.layout is torch.strided else b
    zeros = torch.zeros((a.shape[0], b.shape[1] if b.dim() == 2 else 0), dtype=dense.dtype, device=dense.device)
    return addmm(zeros, a, b, beta=0)


@kernel("mv", keys=_BOTH)
def mv(a: Tensor, b: Tensor) -> Tensor:
    if a.dim() != 2 or b.dim() != 1 or a.shape[1] != b.shape[0]:
        raise RuntimeError(f"mv: expected self.size(-1) == vec.size(-1), got {a.shape[-1]} and {b.shape[-1]}")
    return torch.mm(a, b.unsqueeze(-1)).squeeze(-1)


@kernel("bmm")
def bmm(a: Tensor, b: Tensor) -> Tensor:
    """Multiply the matrices of a COO tensor [batch, m, k] with dense ones [batch, k, n]."""
    if a.layout is not COO or b.layout is not torch.strided or a.sparse_dim() != 3:
        raise UnsupportedOpError("bmm with a sparse tensor as its second one", fix="convert it with to_dense()")
    if b.dim() != 3 or a.shape[0] != b.shape[0] or a.shape[2] != b.shape[1]:
        raise RuntimeError("bmm_sparse: 'self.size(2)' and 'mat2.size(1)' must match, and so must the batches")
    batch, rows, columns = indices_of(a).unbind(0)
    taken = b.reshape(-1, b.shape[2]).index_select(0, batch * b.shape[1] + columns)
    total = add_up(batch * a.shape[1] + rows, values_of(a).unsqueeze(-1) * taken, a.shape[0] * a.shape[1])
    return total.view(a.shape[0], a.shape[1], b.shape[2])


@kernel("_sparse_sparse_matmul")
def sparse_sparse_matmul(a: Tensor, b: Tensor) -> Tensor:
    return _sparse_times(coalesced(a), coalesced(b))


def _sparse_times(a: Tensor, b: Tensor) -> Tensor:
    """Return the product of two sparse matrices of one layout, whose indices the CPU finds."""
    ones = [_ones_on_cpu(x) for x in (a, b)]
    made = torch.mm(*ones)
    if a.dtype != b.dtype:
        raise RuntimeError(f"mat1 dtype {a.dtype} does not match mat2 dtype {b.dtype}")
    (rows, inner), (starts, columns) = _host_pairs(ones[0]), _host_rows(ones[1])
    counts = (starts[1:] - starts[:-1])[inner]
    mine = torch.repeat_interleave(
        torch.arange(inner.shape[0], device="cpu"), counts
    )  # one pair of values for each product
    within = torch.arange(mine.shape[0], device="cpu") - (counts.cumsum(0) - counts)[mine]
    theirs = starts[inner[mine]] + within
    size = (a.shape[0], b.shape[1])
    pairs = flat_indices(torch.stack([rows[mine], columns[theirs]]), size)
    places = flat_indices(torch.stack(_host_pairs(made)), size)
    order = torch.argsort(places)
    target = order[torch.searchsorted(places[order], pairs)]
    products = values_of(a).index_select(0, to_device(mine)) * values_of(b).index_select(0, to_device(theirs))
    values = add_up(to_device(target), products, places.shape[0])
    if made.layout is COO:
        return coo(to_device(made._indices().contiguous()), values, size, made.is_coalesced())
    return compressed(to_device(made.crow_indices()), to_device(made.col_indices()), values, size, CSR)


def _ones_on_cpu(x: Tensor) -> Tensor:
    ones = torch.ones(values_of(x).shape, dtype=torch.float64, device="cpu")
    if x.layout is COO:
        made = torch.sparse_coo_tensor(host_indices(x, "indices to multiply"), ones, x.shape)
        return made._coalesced_(x.is_coalesced())
    starts, plain = (read(part, "indices to multiply") for part in (x.crow_indices(), x.col_indices()))
    return torch.sparse_csr_tensor(starts, plain, ones, x.shape)


def _host_pairs(x: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = pairs_of(x) if x.layout is COO else x.to_sparse()._indices().unbind(0)
    return rows, columns


def _host_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return where each row of a matrix on the CPU begins, and the columns."""
    if x.layout is CSR:
        return x.crow_indices().long(), x.col_indices().long()
    rows, columns = x._indices().unbind(0)
    return starts_of(rows, x.shape[0]), columns


@kernel("sparse_sampled_addmm", keys=(for_compressed,))
def sampled_addmm(x: Tensor, a: Tensor, b: Tensor, *, beta: complex = 1, alpha: complex = 1) -> Tensor:
    """Compute a product of dense matrices where a CSR tensor has values, and add it to them."""
    rows, columns = pairs_of(x)
    found = (a.index_select(0, rows) * b.t().index_select(0, columns)).sum(-1)
    return with_values(x, values_of(x) * beta + found * alpha)
