"""Runs first, and fast: if this fails nothing else is worth reading."""

from __future__ import annotations

import torch

import lazytpu


def test_an_op_is_recorded_and_runs_when_read(device: torch.device) -> None:
    x = torch.tensor([1.0, -2.0], device=device)
    before = lazytpu.metrics.counter("execute")
    y = torch.relu(x) + 1
    assert lazytpu.metrics.counter("execute") == before
    assert y.tolist() == [2.0, 1.0]
    assert lazytpu.metrics.counter("execute") == before + 1


def test_gradients(device: torch.device) -> None:
    w = torch.tensor([3.0], device=device, requires_grad=True)
    (w * w).sum().backward()
    assert w.grad is not None and w.grad.item() == 6.0


def test_a_repeated_step_compiles_once(device: torch.device) -> None:
    x = torch.zeros(31, device=device)
    lazytpu.mark_step()
    before = lazytpu.metrics.counter("compile")
    for _ in range(4):
        x.add_(1)
        lazytpu.mark_step()
    assert lazytpu.metrics.counter("compile") == before + 1
    assert x.tolist() == [4.0] * 31
