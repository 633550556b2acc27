"""Results that go into a tensor given as ``out=``: sizes, strides, dtypes, warnings and errors, against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.lockstep import Case, check, numbers


def _selected(out: torch.Tensor, view: Callable[[torch.Tensor], torch.Tensor], on: Any) -> torch.Tensor:
    return torch.index_select(view(out), 0, torch.arange(0, device=on), out=out)


def _part_of_rows(on: Any, fill: Callable[[torch.Tensor], object]) -> torch.Tensor:
    rows = torch.zeros(2, 3, device=on)
    fill(rows[:, 1:])
    return rows


OUTS: dict[str, Case] = {
    "new": lambda on: torch.add(numbers(2, 3, device=on), 1, out=torch.empty(0, device=on)),
    "resized": lambda on: torch.add(numbers(2, 3, device=on), 1, out=torch.empty(4, device=on)),
    "smaller": lambda on: torch.mul(numbers(2, device=on), 2, out=torch.zeros(4, 4, device=on)),
    "strided": lambda on: torch.add(numbers(2, 3, device=on), 1, out=torch.zeros(3, 2, device=on).t()),
    "like_its_input": lambda on: torch.add(numbers(3, 2, device=on).t(), 1, out=torch.empty(0, device=on)),
    "dtype": lambda on: torch.add(numbers(3, device=on), 0.5, out=torch.empty(3, device=on, dtype=torch.float64)),
    "dtype_loses": lambda on: torch.add(numbers(3, device=on), 1, out=torch.empty(3, device=on, dtype=torch.int64)),
    "sum": lambda on: torch.sum(numbers(2, 3, device=on), 0, out=torch.empty(3, device=on)),
    "sum_dtype": lambda on: torch.sum(numbers(2, 3, device=on), 0, out=torch.empty(3, device=on, dtype=torch.float64)),
    "matmul": lambda on: torch.mm(numbers(2, 3, device=on), numbers(3, 2, device=on), out=torch.empty(0, device=on)),
    "matmul_dtype": lambda on: torch.mm(
        numbers(2, 2, device=on), numbers(2, 2, device=on), out=torch.empty(2, 2, device=on, dtype=torch.float64)
    ),
    "cat": lambda on: torch.cat([numbers(2, device=on)] * 2, out=torch.empty(4, device=on)),
    "two": lambda on: torch.topk(
        numbers(5, device=on), 2, out=(torch.empty(2, device=on), torch.empty(0, device=on, dtype=torch.int64))
    ),
    "two_resized": lambda on: torch.max(
        numbers(2, 3, device=on), 0, out=(torch.empty(1, device=on), torch.empty(1, device=on, dtype=torch.int64))
    ),
    "arange": lambda on: torch.arange(1, 7, 2, out=torch.empty(0, device=on, dtype=torch.int64)),
    "arange, a part of rows": lambda on: _part_of_rows(on, lambda part: torch.arange(4, out=part)),
    "linspace, a part of rows": lambda on: _part_of_rows(on, lambda part: torch.linspace(0, 3, 4, out=part)),
    "logspace, columns": lambda on: torch.logspace(0, 3, 6, out=torch.zeros(3, 2, device=on).t()),
    "cat, channels last": lambda on: torch.cat(
        [numbers(2, 3, 2, 2, device=on).to(memory_format=torch.channels_last)] * 2, out=torch.empty(0, device=on)
    ),
    "complex_result": lambda on: torch.add(numbers(3, device=on), 1j, out=torch.empty(3, device=on)),
    "nonzero": lambda on: torch.nonzero(
        numbers(2, 3, device=on) > 1, out=torch.empty(0, 2, dtype=torch.int64, device=on)
    ),
    "a factor of a matrix": lambda on: torch.linalg.cholesky(
        numbers(2, 2, device=on) + 4 * torch.eye(2, device=on), out=torch.empty(0, device=on)
    ),
    "an inverse": lambda on: torch.linalg.inv(torch.eye(3, device=on), out=torch.empty(0, device=on)),
    "a spectrum of columns": lambda on: torch.fft.fft(
        numbers(2, 3, device=on), dim=0, out=torch.empty(0, dtype=torch.complex64, device=on)
    ),
    "wrong_shapes": lambda on: torch.add(numbers(3, device=on), numbers(2, device=on), out=torch.empty(3, device=on)),
    "pow": lambda on: torch.pow(numbers(3, device=on), 2, out=torch.empty(3, device=on)),
    "kron": lambda on: torch.kron(
        numbers(2, 2, device=on), numbers(2, device=on), out=torch.zeros(2, 4, 2, device=on)[..., 1]
    ),
    "empty, a view of it": lambda on: _selected(torch.empty(0, device=on), lambda x: x[:0], on),
    "empty, itself": lambda on: _selected(torch.empty(0, device=on), lambda x: x, on),
    "all": lambda on: torch.all(numbers(2, 3, device=on), 1, out=torch.empty(2, device=on, dtype=torch.bool)),
    "clamp": lambda on: torch.clamp(numbers(5, device=on), 1, 3, out=torch.empty(5, device=on)),
    "where": lambda on: torch.where(
        numbers(3, device=on) > 1, numbers(3, device=on), 7.0, out=torch.empty(3, device=on)
    ),
}


@pytest.mark.parametrize("name", OUTS)
def test_out(name: str, device: torch.device) -> None:
    check(OUTS[name], device)


def test_out_returns_what_it_was_given(device: torch.device) -> None:
    out = torch.empty(3, device=device)
    assert torch.add(numbers(3, device=device), 1, out=out) is out


def test_an_operand_that_is_too_small_for_the_result_raises_as_on_the_cpu(device: torch.device) -> None:
    small, large = torch.zeros(2, 1), torch.ones(2)
    there = small.to(device)
    for function in (torch.add, torch.mul, torch.maximum, torch.eq):
        with pytest.raises(RuntimeError) as expected:
            function(large, small, out=small)
        with pytest.raises(RuntimeError) as found:
            function(large.to(device), there, out=there)
        assert str(found.value) == str(expected.value)
        assert there.shape == (2, 1)


def test_an_unsafe_view_shares_memory(device: torch.device) -> None:
    x = torch.zeros(2, 3).to(device).requires_grad_()
    y = x * 2
    part = torch.ops.aten._unsafe_view(y, [6])
    with torch.no_grad():
        part.fill_(3)
    assert not part._is_view() and y.sum().item() == 18
    torch.kron(torch.ones(2, 2).to(device), torch.ones(1, 2).to(device), out=(z := torch.empty(2, 4).to(device)))
    assert z.sum().item() == 8
