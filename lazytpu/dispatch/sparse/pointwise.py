"""Kernels of sparse tensors that compute with their values: functions, sums, products element by element."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch
from torch import Tensor

from lazytpu.dispatch.sparse.coo import assign, like, values_at
from lazytpu.dispatch.sparse.parts import (
    COO,
    add_up,
    coo,
    flat_indices,
    host_indices,
    indices_of,
    kernel,
    sparse_first,
    sparse_size,
    to_device,
    values_of,
    with_values,
)
from lazytpu.dispatch.sparse.positions import coalesced, gather, numbered, on_cpu
from lazytpu.errors import UnsupportedOpError
from lazytpu.ir.op_schema import aten

FUNCTIONS = (
    "abs asin asinh atan atanh ceil deg2rad erf erfinv expm1 floor frac isinf isnan isneginf isposinf log1p nan_to_num "
    "rad2deg relu round sgn sign signbit sin sinh sqrt tan tanh trunc"
).split()
"""Functions that keep zero, which torch computes of coalesced tensors."""

_Function = Callable[..., Tensor]


def register_functions() -> None:
    """Make the kernels of `FUNCTIONS`, and of their forms in place."""
    for name in FUNCTIONS:
        kernel(name)(_of_coalesced(getattr(aten, name).default))
        if hasattr(aten, name + "_"):
            kernel(name + "_")(_in_place(getattr(aten, name).default, name + "_"))
    kernel("pow.Tensor_Scalar")(_of_coalesced(aten.pow.Tensor_Scalar))
    for name in (
        "add_.Tensor",
        "sub_.Tensor",
        "mul_.Tensor",
        "div_.Tensor",
        "div_.Tensor_mode",
        "floor_divide_.Tensor",
    ):
        kernel(name)(_assigning(*name.split("_.")))
    for name in ("add", "sub", "mul", "div"):  # what torch composes `mul_.Scalar` and others of
        kernel(f"{name}.out")(_into_out(getattr(aten, name).Tensor))


def _of_coalesced(function: _Function) -> _Function:
    def compute(x: Tensor, *args: object, **kwargs: object) -> Tensor:
        x = coalesced(x)
        return with_values(x, function(values_of(x), *args, **kwargs))

    return compute


def _in_place(function: _Function, name: str) -> _Function:
    def compute(x: Tensor, *args: object, **kwargs: object) -> Tensor:
        if not x.is_coalesced():
            raise RuntimeError(f"{name} requires coalesced input")
        values_of(x).copy_(function(values_of(x), *args, **kwargs))
        return x

    return compute


def _assigning(name: str, overload: str) -> _Function:
    """Return the kernel of an op in place, which computes the result beside and takes it over."""
    function: _Function = getattr(getattr(aten, name), "default" if name == "floor_divide" else overload)

    def compute(x: Tensor, *args: object, **kwargs: object) -> Tensor:
        made = function(x, *args, **kwargs)
        if not torch.can_cast(made.dtype, x.dtype):
            raise RuntimeError(f"result type {_dtype(made)} can't be cast to the desired output type {_dtype(x)}")
        return assign(x, made) if x.layout is COO else x.copy_(made)

    return compute


def _into_out(function: _Function) -> _Function:
    def compute(*args: object, out: Tensor, **kwargs: object) -> Tensor:
        return out.copy_(function(*args, **kwargs))

    return compute


def _dtype(x: Tensor) -> str:
    names = {torch.float32: "Float", torch.float64: "Double", torch.int64: "Long", torch.int32: "Int"}
    return names.get(x.dtype, str(x.dtype).removeprefix("torch."))


@kernel("neg")
def neg(x: Tensor) -> Tensor:
    return with_values(x, -values_of(x))


@kernel("neg_")
def neg_(x: Tensor) -> Tensor:
    values_of(x).neg_()
    return x


@kernel("threshold_backward")
def threshold_backward(grad: Tensor, x: Tensor, threshold: float) -> Tensor:
    if not grad._nnz():
        return with_values(coalesced(x), torch.zeros_like(values_of(coalesced(x))))
    grad, x = coalesced(grad), coalesced(x)
    return with_values(grad, aten.threshold_backward.default(values_of(grad), values_of(x), threshold))


# --- sums ----------------------------------------------------------------------------------------------------


@kernel("add.Tensor")
def add(a: Tensor | complex, b: Tensor | complex, *, alpha: complex = 1) -> Tensor:
    """Add a COO tensor to a dense one, or two COO tensors, merged as the CPU merges them."""
    if not isinstance(a, Tensor):
        a = torch.tensor(a, device="cpu")
    if not isinstance(b, Tensor) or b.layout is torch.strided:
        raise RuntimeError("add(sparse, dense) is not supported. Use add(dense, sparse) instead.")
    dtype = torch.result_type(a, b)
    if a.layout is torch.strided:
        if a.shape != b.shape:
            raise RuntimeError(
                f"add: expected 'self' and 'other' to have same size, but self has size {list(a.shape)} while other "
                f"has size {list(b.shape)} (FYI: dense-sparse addition does not currently support broadcasting)"
            )
        size = sparse_size(b)
        flat = flat_indices(indices_of(b), size)
        values = values_of(b).to(dtype) * alpha if alpha != 1 else values_of(b).to(dtype)
        total = a.to(dtype).clone(memory_format=torch.contiguous_format)
        total.view(prod(size), *b.shape[len(size) :]).index_add_(0, flat, values)
        return total
    if a.shape != b.shape:
        raise RuntimeError(
            f"add: expected sizes of 'self' and 'other' to match, but {list(a.shape)} != {list(b.shape)}"
        )
    reason, first = "indices to add", values_of(a).numel() + 1
    other = numbered(b, reason)
    host = numbered(a, reason).add(on_cpu(b, other._values() * first, reason))
    numbers = host._values()
    mine, theirs = (values_of(x).to(dtype).reshape(-1) for x in (a, b))
    total = gather(mine, numbers % first) + gather(theirs * alpha if alpha != 1 else theirs, numbers // first)
    return coo(to_device(host._indices().contiguous()), total, a.shape, host.is_coalesced())


@kernel("sub.Tensor")
def sub(a: Tensor | complex, b: Tensor | complex, *, alpha: complex = 1) -> Tensor:
    return add(a, b, alpha=-alpha)


@kernel("any")
def any_(x: Tensor) -> Tensor:
    return values_of(x).any()


@kernel("sum")
def sum_(x: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    return values_of(x).sum(dtype=dtype)


@kernel("sum.dim_IntList")
def sum_dims(
    x: Tensor, dim: Sequence[int] | None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Add values up whose other indices are the same."""
    count, dims = x.sparse_dim(), sorted({d % x.dim() for d in dim or range(x.dim())})
    values = values_of(x)
    values = (
        values.sum([d - count + 1 for d in dims if d >= count], dtype=dtype, keepdim=keepdim)
        if any(d >= count for d in dims)
        else values.to(
            dtype or (torch.int64 if not values.is_floating_point() and not values.is_complex() else x.dtype)
        )
    )
    ones = torch.ones(values_of(x).shape[:1], dtype=torch.int64, device="cpu")
    flat_dense = torch.sparse_coo_tensor(host_indices(x, "indices to sum"), ones, sparse_size(x))
    made = flat_dense._coalesced_(x.is_coalesced()).sum([d for d in dims if d < count], keepdim)
    size = [1 if d in dims else n for d, n in enumerate(x.shape) if keepdim or d not in dims]
    if made.layout is torch.strided:
        return values.sum(0).view(size)
    kept = flat_dense._indices().clone()
    if keepdim:
        kept[[d for d in dims if d < count]] = 0
    else:
        kept = kept[[d for d in range(count) if d not in dims]]
    places = flat_indices(made._indices(), made.shape)
    order = torch.argsort(places)
    target = order[torch.searchsorted(places[order], flat_indices(kept, made.shape))]
    total = add_up(to_device(target), values, places.shape[0])
    return coo(to_device(made._indices().contiguous()), total, size, made.is_coalesced())


@kernel("_sparse_sum_backward")
def sparse_sum_backward(grad: Tensor, x: Tensor, dim: Sequence[int]) -> Tensor:
    """Give each value of ``x``, coalesced, the gradient of the sum it went to."""
    dense = grad.to_dense() if grad.layout is COO else grad
    for d in sorted({d % x.dim() for d in dim}):
        dense = dense.unsqueeze(d)
    x = coalesced(x)
    return with_values(x, values_at(dense.expand(x.shape), x), coalesced=False)


@kernel("native_norm", "native_norm.ScalarOpt_dim_dtype", "norm.ScalarOpt_dim", "norm.ScalarOpt_dim_dtype")
def norm(
    x: Tensor,
    p: float | None = 2,
    dim: Sequence[int] = (),
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    if dim or keepdim or dtype is not None:
        raise RuntimeError(
            "norm_sparse currently only supports full reductions, so 'dim' must be empty or contain all dims"
        )
    total: Tensor = torch.linalg.vector_norm(values_of(coalesced(x)), 2 if p is None else p)
    return total


# --- products ------------------------------------------------------------------------------------------------


@kernel("mul.Tensor")
def mul(a: Tensor | complex, b: Tensor | complex) -> Tensor:
    """Multiply values by a number, by a dense tensor, or with those of another COO tensor at the same places."""
    a, b = sparse_first(a, b)
    if not isinstance(b, Tensor) or b.layout is torch.strided and b.dim() == 0:
        return with_values(a, values_of(a) * b)
    if b.layout is torch.strided:
        if b.dim() > a.dim() or torch.broadcast_shapes(a.shape, b.shape) != a.shape:
            raise UnsupportedOpError("a product that makes a sparse tensor larger", fix="expand it with to_dense()")
        return with_values(a, values_of(a) * values_at(b.expand(a.shape), a))
    if b.dim() == 0 and b.sparse_dim() == 0:
        return with_values(a, values_of(a) * values_of(b).sum())
    if not a.is_coalesced() and not b.is_coalesced():
        a, b = (coalesced(a), b) if a._nnz() >= b._nnz() else (a, coalesced(b))
    reason = "indices to multiply"
    hosts = [numbered(x, reason) for x in (a, b)]
    ones = [on_cpu(x, torch.ones_like(host._values()), reason) for x, host in zip((a, b), hosts, strict=True)]
    mine, theirs = hosts[0] * ones[1], ones[0] * hosts[1]
    dtype = torch.result_type(a, b)
    product = gather(values_of(a).to(dtype).reshape(-1), mine._values()) * gather(
        values_of(b).to(dtype).reshape(-1), theirs._values()
    )
    return coo(to_device(mine._indices().contiguous()), product, a.shape, mine.is_coalesced())


@kernel("div.Tensor")
def div(x: Tensor, y: Tensor | float) -> Tensor:
    return with_values(x, values_of(x) / _divisor(y))


@kernel("div.Tensor_mode")
def div_mode(x: Tensor, y: Tensor | float, *, rounding_mode: str | None) -> Tensor:
    x = x if rounding_mode is None else coalesced(x)
    return with_values(x, torch.div(values_of(x), _divisor(y), rounding_mode=rounding_mode))


@kernel("floor_divide")
def floor_divide(x: Tensor, y: Tensor | float) -> Tensor:
    return div_mode(x, y, rounding_mode="floor")


def _divisor(y: Tensor | float) -> Tensor | float:
    if not isinstance(y, Tensor):
        return y
    if y.dim():
        raise RuntimeError(
            "Sparse division requires a scalar or zero-dim dense tensor divisor "
            f"(got shape {list(y.shape)} for divisor)"
        )
    if y.layout is not torch.strided:
        raise RuntimeError("Sparse division requires a scalar or zero-dim dense tensor divisor")
    return y


# --- softmax over the values that are there -------------------------------------------------------------------


def _groups(x: Tensor, dim: int) -> tuple[Tensor, int]:
    """Return for each value of a COO tensor which row along ``dim`` it is in, and the number of rows."""
    size = [n for d, n in enumerate(sparse_size(x)) if d != dim]
    others = [d for d in range(x.sparse_dim()) if d != dim]
    return flat_indices(torch.stack([indices_of(x)[d] for d in others]), size) if others else torch.zeros(
        x._nnz(), dtype=torch.int64, device=x.device
    ), prod(size)


def _normalized(x: Tensor, dim: int, log: bool) -> Tensor:
    x, dim = coalesced(x), dim % x.dim()
    values = values_of(x)
    if dim >= x.sparse_dim():
        function = torch.log_softmax if log else torch.softmax
        return like(x, function(values, dim - x.sparse_dim() + 1))
    group, count = _groups(x, dim)
    lowest = torch.full((count, *values.shape[1:]), float("-inf"), dtype=values.dtype, device=values.device)
    spread = group.view(-1, *[1] * (values.dim() - 1)).expand(values.shape)
    highest = lowest.scatter_reduce(0, spread, values, "amax").index_select(0, group)
    shifted = values - highest
    total = add_up(group, shifted.exp(), count).index_select(0, group)
    return like(x, shifted - total.log() if log else shifted.exp() / total)


@kernel("_sparse_softmax")
def sparse_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return _normalized(x, dim, log=False)


@kernel("_sparse_log_softmax")
def sparse_log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return _normalized(x, dim, log=True)


def _normalized_backward(grad: Tensor, out: Tensor, dim: int, log: bool) -> Tensor:
    dim %= out.dim()
    given = values_of(grad) if grad._nnz() == out._nnz() else values_of(grad.sparse_mask(out))
    values = values_of(out)
    if dim >= out.sparse_dim():
        inner = dim - out.sparse_dim() + 1
        total = (given if log else given * values).sum(inner, keepdim=True)
    else:
        group, count = _groups(out, dim)
        total = add_up(group, given if log else given * values, count).index_select(0, group)
    return like(out, given - values.exp() * total if log else values * (given - total))


@kernel("_sparse_softmax_backward_data")
def sparse_softmax_backward(grad: Tensor, out: Tensor, dim: int, x: Tensor) -> Tensor:
    return _normalized_backward(grad, out, dim, log=False)


@kernel("_sparse_log_softmax_backward_data")
def sparse_log_softmax_backward(grad: Tensor, out: Tensor, dim: int, x: Tensor) -> Tensor:
    return _normalized_backward(grad, out, dim, log=True)
