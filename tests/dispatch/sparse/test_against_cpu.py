"""Sparse tensors give what they give on the CPU: values, places and their order, what is coalesced, and errors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import lazytpu

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")
PLACES = [[0, 1, 1, 0], [2, 0, 2, 2]]


class Inputs:
    """The tensors that the cases are made of, on one device."""

    def __init__(self, device: torch.device) -> None:
        def put(x: torch.Tensor) -> torch.Tensor:
            return x.to(device)

        self.u = put(torch.sparse_coo_tensor(PLACES, torch.tensor([3.0, 4, 5, 6]), (2, 3)))
        self.c = self.u.coalesce()
        self.w = put(torch.sparse_coo_tensor([[1, 0], [1, 2]], torch.tensor([1.0, 2.0]), (2, 3)))
        self.h = put(torch.sparse_coo_tensor(PLACES, torch.arange(8.0).view(4, 2), (2, 3, 2)))
        self.d = torch.arange(6.0, device=device).view(2, 3)
        self.e = torch.arange(12.0, device=device).view(2, 3, 2)
        self.r = self.u.to_sparse_csr()
        self.one = torch.ones(2, device=device)
        self.at = torch.tensor([2, 0, 2], device=device)


CASES: dict[str, Callable[[Inputs], object]] = {
    "coalesce": lambda x: x.h.coalesce(),
    "add": lambda x: x.u + x.w,
    "add coalesced": lambda x: x.c + x.w.coalesce(),
    "add to coalesced": lambda x: x.u + x.c,
    "add with dense dims": lambda x: x.h + x.h.coalesce(),
    "sub": lambda x: x.u - x.w,
    "add of dtypes": lambda x: x.u.int() + x.w,
    "dense add": lambda x: x.d + x.u,
    "dense add in place": lambda x: x.d.add_(x.u, alpha=2),
    "add in place": lambda x: x.u.clone().add_(x.w),
    "mul": lambda x: x.u * x.w,
    "mul coalesced": lambda x: x.c * x.w.coalesce(),
    "mul by number": lambda x: 2 * x.u,
    "mul by dense": lambda x: x.h * x.e,
    "mul by row": lambda x: x.c * x.d[0],
    "mul in place": lambda x: x.u.clone().mul_(2),
    "foreach": lambda x: torch._foreach_mul([x.u], 0.5)[0],
    "div": lambda x: x.u / 2,
    "floor div": lambda x: x.u // 2,
    "neg": lambda x: -x.u,
    "relu": lambda x: x.u.relu(),
    "sqrt of ints": lambda x: x.u.long().sqrt(),
    "pow": lambda x: x.u**2,
    "isnan": lambda x: x.u.isnan(),
    "sin in place": lambda x: x.c.clone().sin_(),
    "sum": lambda x: x.u.sum(),
    "sum of rows": lambda x: x.u.sum(0),
    "sum kept": lambda x: x.u.sum(1, keepdim=True),
    "sum of both": lambda x: x.h.sum((0, 2)),
    "sparse.sum": lambda x: torch.sparse.sum(x.h, (0, 1)),
    "norm": lambda x: x.u.norm(),
    "any": lambda x: x.u.any(),
    "softmax": lambda x: torch.sparse.softmax(x.h, 1),
    "softmax of dense dim": lambda x: torch.sparse.softmax(x.h, 2),
    "log_softmax": lambda x: torch.sparse.log_softmax(x.u, 0),
    "t": lambda x: x.c.t(),
    "permute": lambda x: x.h.permute(1, 0, 2),
    "unsqueeze": lambda x: x.c.unsqueeze(0),
    "cat": lambda x: torch.cat([x.c, x.w], 1),
    "stack": lambda x: torch.stack([x.u, x.w]),
    "index_select": lambda x: x.c.index_select(1, x.at),
    "select": lambda x: x.c[1],
    "element": lambda x: x.u[0, 2],
    "narrow": lambda x: x.c.narrow_copy(1, 1, 2),
    "mm": lambda x: torch.sparse.mm(x.u, x.d.t()),
    "dense mm": lambda x: x.d.t() @ x.u,
    "sparse mm": lambda x: x.u @ x.w.t(),
    "mv": lambda x: x.u @ x.d[0],
    "addmm": lambda x: torch.sparse.addmm(x.one[:, None] * x.one, x.u, x.d.t(), beta=2, alpha=3),
    "bmm": lambda x: torch.bmm(x.u.unsqueeze(0), x.d.t()[None]),
    "linear": lambda x: torch.nn.functional.linear(x.d, x.u),
    "mask": lambda x: x.e.sparse_mask(x.h),
    "mask of sparse": lambda x: x.w.sparse_mask(x.u),
    "to_dense": lambda x: x.h.to_dense(),
    "bool to_dense": lambda x: x.u.bool().to_dense(),
    "to_sparse": lambda x: x.d.to_sparse(),
    "to_sparse(1)": lambda x: x.e.to_sparse(1),
    "spdiags": lambda x: torch.sparse.spdiags(x.d, torch.tensor([0, 1]), (3, 3)),
    "dtype": lambda x: x.u.to(torch.float16),
    "zeros_like": lambda x: torch.zeros_like(x.u),
    "copy_": lambda x: x.w.clone().copy_(x.u),
    "zero_": lambda x: x.u.clone().zero_(),
    "no values": lambda x: torch.sparse.mm(torch.sparse_coo_tensor(size=(3, 2), device=x.d.device), x.d),
    "sizes found": lambda x: torch.sparse_coo_tensor([[0, 5]], [1.0, 2.0], device=x.d.device),
    "csr": lambda x: x.r,
    "csr of dense": lambda x: x.d.to_sparse_csr(),
    "csc": lambda x: x.u.to_sparse_csc(),
    "csr to coo": lambda x: x.r.to_sparse(),
    "csr to_dense": lambda x: x.r.to_dense(),
    "csr mm": lambda x: x.r @ x.d.t(),
    "dense csr mm": lambda x: x.d.t() @ x.r,
    "csr csr mm": lambda x: (x.r @ x.r.t()).to_dense(),
    "csr add": lambda x: x.r + x.w.to_sparse_csr(),
    "dense csr add": lambda x: x.d + x.r,
    "csr mul": lambda x: x.r * 2,
    "csr mul csr": lambda x: x.r * x.r,
    "csr mul dense": lambda x: x.r * x.d,
    "csr relu": lambda x: x.r.relu(),
    "csr sum": lambda x: torch.sum(x.r, 1, keepdim=True),
    "csr t": lambda x: x.r.t(),
    "csr row": lambda x: x.r[0],
    "csr mask": lambda x: x.d.sparse_mask(x.r),
    "sampled_addmm": lambda x: torch.sparse.sampled_addmm(x.r, x.one[:, None] * x.one, x.d),
    # what raises
    "add dense": lambda x: x.u + x.d,
    "add number": lambda x: x.u + 1,
    "add sizes": lambda x: x.u + x.u.t(),
    "dense add sizes": lambda x: x.d.t() + x.u,
    "mul sizes": lambda x: x.c * x.c.t(),
    "div dense": lambda x: x.u / x.d,
    "sin uncoalesced in place": lambda x: x.u.clone().sin_(),
    "mm sizes": lambda x: x.u @ x.d,
    "mm dtypes": lambda x: x.u @ x.d.t().double(),
    "mask sizes": lambda x: x.d.t().sparse_mask(x.u),
    "indices of uncoalesced": lambda x: x.u.indices(),
    "storage": lambda x: x.u.untyped_storage(),
    "numpy": lambda x: x.u.numpy(),
    "index out of range": lambda x: torch.sparse_coo_tensor(
        [[0, 5]], [1.0, 2.0], (3,), device=x.d.device, check_invariants=True
    ),
}


def outcome(case: str, device: torch.device) -> object:
    """Return what a case gives, as plain Python, or the error that it raises."""
    try:
        found = CASES[case](Inputs(device))
    except (RuntimeError, TypeError) as error:
        return str(error).partition("\n")[0]
    assert isinstance(found, torch.Tensor) and found.device.type == device.type
    shown: list[object] = [found.layout, found.shape, found.dtype]
    if found.layout is torch.strided:
        return [*shown, found.stride(), numbers(found)]
    if found.layout is torch.sparse_coo:
        return [*shown, found.is_coalesced(), found._indices().tolist(), numbers(found._values())]
    csr = found.layout is torch.sparse_csr
    indices = (found.crow_indices(), found.col_indices()) if csr else (found.ccol_indices(), found.row_indices())
    return [*shown, [i.tolist() for i in indices], numbers(found.values())]


def numbers(x: torch.Tensor) -> object:
    found = x.cpu().flatten().tolist()
    return x.shape, found if x.device.type == "cpu" else pytest.approx(found, rel=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_gives_what_the_cpu_gives(case: str) -> None:
    assert outcome(case, lazytpu.device()) == outcome(case, torch.device("cpu"))
    assert not lazytpu.metrics.fallbacks()


def test_what_has_no_kernel_names_the_op_and_the_line() -> None:
    x = Inputs(lazytpu.device())
    with pytest.raises(NotImplementedError) as error:
        x.u.exp()
    assert "aten::exp does not take sparse tensors" in str(error.value)
    assert "test_against_cpu.py" in str(error.value)
    with pytest.raises(NotImplementedError, match="layout BSR"):
        torch.eye(4, device=lazytpu.device()).to_sparse_bsr((2, 2))


def test_a_sparse_tensor_is_no_array() -> None:
    with pytest.raises(NotImplementedError, match="expected a dense tensor"):
        lazytpu.to_jax(Inputs(lazytpu.device()).u)
