"""Interpreted graphs bear values that end the process where torch's kernel gets them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import lazytpu

INDICES = [0, 7, -3, 100_000_000]


def _bags(device: torch.device) -> torch.Tensor:
    weight = torch.ones(5, 3).to(device).requires_grad_()
    i, offsets = (torch.tensor(x).to(device) for x in (INDICES, [0, 2]))
    F.embedding_bag(i, weight, offsets).sum().backward()
    return weight.grad


def _labels(device: torch.device) -> torch.Tensor:
    logs = torch.zeros(6, 2, 4).log_softmax(-1).to(device).requires_grad_()
    lengths = torch.tensor([6, 6]), torch.tensor([2, 2])
    return F.ctc_loss(logs, torch.tensor([[1, 2], [100_000_000, -5]]).to(device), *lengths, reduction="none")[:1]


def _least(device: torch.device) -> torch.Tensor:
    return torch.div(torch.tensor([-(2**31), 5], dtype=torch.int32).to(device), -1, rounding_mode="trunc")


def _far_points(device: torch.device) -> torch.Tensor:
    image = torch.ones(1, 1, 2, 2).to(device).requires_grad_()
    grid = torch.full((1, 1, 2, 2), torch.nan)
    grid[0, 0, 0] = 0
    F.grid_sample(image, grid.to(device), padding_mode="border", align_corners=True)[..., 0].sum().backward()
    return image.grad


def _unknown_matrix(device: torch.device) -> torch.Tensor:
    return torch.linalg.eigvals(torch.full((2, 2), torch.nan).to(device)).real


CASES: dict[str, tuple[Callable[[torch.device], torch.Tensor], torch.Tensor]] = {
    "embedding_bag": (_bags, torch.tensor([[0.5] * 3] + [[0.0] * 3] * 4)),
    "ctc_loss": (
        _labels,
        F.ctc_loss(torch.zeros(6, 1, 4).log_softmax(-1), torch.tensor([[1, 2]]), (6,), (2,), reduction="none"),
    ),
    "grid_sample": (_far_points, torch.full((1, 1, 2, 2), 0.25)),
    "eigvals": (_unknown_matrix, torch.full((2,), torch.nan)),
    "div": (_least, torch.tensor([-(2**31), -5], dtype=torch.int32)),
}


@pytest.mark.parametrize("name", CASES)
def test_values_that_end_the_process(device: torch.device, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazytpu.config, "compile_after", 99)
    call, want = CASES[name]
    torch.testing.assert_close(call(device).detach().cpu(), want, equal_nan=True)
