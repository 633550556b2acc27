"""Products of groups of rows: all layouts, groups without rows, rows without a group, and products of float8."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import lazytpu
from lazytpu.lowering.registry import lowering_for
from tests.support.op_checks import error_of, tensors

ENDS = {
    "even": [8, 16, 24, 32],
    "none in two groups": [0, 20, 20, 32],
    "all in the last": [0, 0, 0, 32],
}
SHAPES = {
    "rows": ((32, 16), (4, 16, 8)),
    "columns": ((4, 16, 8), (8, 32)),
    "sums": ((16, 32), (32, 8)),
}


def results(shapes: Any, ends: list[int], dtype: torch.dtype, device: torch.device | str) -> list[torch.Tensor]:
    """Return the product and its gradients."""
    torch.manual_seed(0)
    a, b = (torch.randn(shape).to(dtype).to(device).requires_grad_() for shape in shapes)
    product = torch._grouped_mm(a, b, offs=torch.tensor(ends, dtype=torch.int32, device=device))
    weights = torch.randn(product.shape, device="cpu").to(device, dtype)
    return [product.detach(), *torch.autograd.grad(product, (a, b), weights)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_it_is_the_product_of_the_cpu(shapes: Any, dtype: torch.dtype, device: torch.device) -> None:
    pairs = [(results(shapes, e, dtype, device), results(shapes, e, dtype, "cpu")) for e in ENDS.values()]
    lazytpu.mark_step()
    for got, want in pairs:
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a.cpu(), b, rtol=2e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-4)
            assert a.stride() == b.stride()


def test_rows_of_no_group_are_zero_and_blocks_are_many(device: torch.device) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(1000, 8), torch.randn(3, 8, 4)
    ends = torch.tensor([700, 701, 900], dtype=torch.int32)
    got = torch._grouped_mm(a.to(device), b.to(device), offs=ends.to(device)).cpu()
    torch.testing.assert_close(got[:900], torch._grouped_mm(a[:900], b, offs=ends))
    assert not got[900:].any()


def test_the_form_for_tpus(device: torch.device) -> None:
    torch.manual_seed(0)
    a, b, ends = torch.randn(6, 8), torch.randn(3, 8, 4), torch.tensor([2, 2, 5], dtype=torch.int32)
    got = torch._grouped_mm(a.to(device), b.to(device), offs=ends.to(device))
    with lowering_for("tpu"):
        assert "ragged_dot" in lazytpu.stablehlo_text(got)
        torch.testing.assert_close(got.cpu()[:5], torch._grouped_mm(a[:5], b, offs=ends))


def test_errors_are_those_of_the_cpu(device: torch.device) -> None:
    for arguments in [
        (torch.ones(4, 8), torch.ones(2, 8, 4), None),
        (torch.ones(4, 8), torch.ones(2, 8, 4), torch.tensor([2, 4])),
        (torch.ones(4, 8), torch.ones(3, 8, 4), torch.tensor([2, 4], dtype=torch.int32)),
        (torch.ones(4, 8), torch.ones(2, 7, 4), torch.tensor([2, 4], dtype=torch.int32)),
    ]:
        _, want = error_of(torch._grouped_mm, *arguments)
        _, got = error_of(torch._grouped_mm, *(x if x is None else x.to(device) for x in arguments))
        assert want is not None
        assert (type(got), str(got)) == (type(want), str(want))


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, None], ids=str)
def test_products_of_float8(out_dtype: torch.dtype | None, device: torch.device) -> None:
    torch.manual_seed(0)
    a, b = (torch.randn(16, 32).to(torch.float8_e4m3fn) for _ in range(2))
    one, rows, columns = torch.tensor(0.5), torch.rand(16, 1) + 0.5, torch.rand(1, 16) + 0.5
    bias = torch.randn(16).to(out_dtype) if out_dtype is not None else None
    pairs = []
    for scales in ((one, one), (rows, columns)):
        if out_dtype is None and scales[0] is rows:
            continue
        want = torch._scaled_mm(a, b.t(), *scales, bias=bias, out_dtype=out_dtype)
        ours = [x if x is None else x.to(device) for x in (a, b, *scales, bias)]
        pairs.append((torch._scaled_mm(ours[0], ours[1].t(), *ours[2:4], bias=ours[4], out_dtype=out_dtype), want))
    lazytpu.mark_step()
    for got, want in pairs:
        assert got.dtype == want.dtype
        torch.testing.assert_close(tensors(got.cpu().float()), tensors(want.float()), rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("recipe", [F.ScalingType.TensorWise, F.ScalingType.RowWise])
def test_scaled_mm_of_functional(recipe: F.ScalingType, device: torch.device) -> None:
    torch.manual_seed(0)
    a, b = (torch.randn(16, 32).to(torch.float8_e4m3fn) for _ in range(2))
    rows = recipe == F.ScalingType.RowWise
    scales = (torch.rand(16, 1) + 0.5, torch.rand(1, 16) + 0.5) if rows else (torch.tensor(0.5), torch.tensor(2.0))
    want = torch._scaled_mm(a, b.t(), *scales, out_dtype=torch.bfloat16)
    x, y, *by = [t.to(device) for t in (a, b, *scales)]
    got = F.scaled_mm(x, y.t(), by[0], recipe, by[1], recipe, output_dtype=torch.bfloat16)
    torch.testing.assert_close(got.cpu(), want, rtol=1e-2, atol=1e-5)
