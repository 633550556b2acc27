"""Sums of the gradients of slices, which a loop over time gives, are put side by side."""

from __future__ import annotations

import pytest
import torch

import lazytpu
from lazytpu.lowering import slice_sums
from lazytpu.tracing.reading import pending_graph

STEPS = 6


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazytpu.config, "compile_after", 1)


def scanned(x: torch.Tensor, steps: int = STEPS) -> torch.Tensor:
    state = torch.zeros_like(x[:, 0])
    for t in range(steps):
        state = torch.sin(state + x[:, t])
    return state.sum()


def twice(x: torch.Tensor) -> torch.Tensor:
    return scanned(x) + sum((x[:, t] * t).sum() for t in range(STEPS)) + (x * x).sum()


def rows(x: torch.Tensor) -> torch.Tensor:
    """Read pieces of several rows, one of them twice, with gaps at both ends."""
    return sum((x[start:stop] ** 2).sum() for start, stop in ((1, 3), (3, 4), (-4, 6), (1, 3), (6, 7)))


def crossing(x: torch.Tensor) -> torch.Tensor:
    """Read pieces that overlap, others along another dimension and in steps."""
    parts = [x[t : t + 2] for t in range(5)] + [x[:, 1:3], x[::2], x[1], x[1, 1:3], x[6], x[3], x[5]]
    return sum((part**2).sum() for part in parts)


@pytest.mark.parametrize("read", [scanned, twice, rows, crossing], ids=lambda read: read.__name__)
def test_gradients_are_those_of_the_cpu(read, device: torch.device, compiling: None) -> None:
    x = torch.randn(8, STEPS + 1, 3, generator=torch.Generator().manual_seed(0))
    there = x.to(device).requires_grad_()
    read(there).backward()
    assert slice_sums.SliceSums(pending_graph()).sums
    x.requires_grad_()
    read(x).backward()
    torch.testing.assert_close(there.grad.cpu(), x.grad, rtol=1e-5, atol=1e-6)


def test_no_slice_is_padded(device: torch.device) -> None:
    x = torch.ones(8, STEPS, 3).to(device).requires_grad_()
    scanned(x).backward()
    assert " pad(" not in lazytpu.hlo_text(x.grad, optimized=True)


def test_few_slices_and_sums_that_are_read_before_the_end_are_left_alone(device: torch.device) -> None:
    x = torch.ones(8, STEPS, 3).to(device).requires_grad_()
    scanned(x, slice_sums._FEWEST - 1).backward()
    assert not slice_sums.SliceSums(pending_graph()).sums
    lazytpu.mark_step()
    total, seen = torch.zeros(STEPS, 3, device=device), []
    for t in range(STEPS):
        total = total + torch.ops.aten.select_backward(torch.ones(3, device=device), [STEPS, 3], 0, t)
        seen.append(total)
    assert not slice_sums.SliceSums(pending_graph()).sums
