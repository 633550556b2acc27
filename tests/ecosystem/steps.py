"""What many cases share: numbers drawn the same for both devices, and a few steps of training."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn


def drawn(seed: int, *size: int) -> torch.Tensor:
    """Return normal numbers on the CPU."""
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def fit(
    model: nn.Module,
    loss: Callable[[], torch.Tensor],
    steps: int = 3,
    make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None,
) -> float:
    """Return the loss of the last of some steps, of SGD unless an optimizer is given."""
    optimizer = make(model.parameters()) if make else torch.optim.SGD(model.parameters(), 1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        last = loss()
        last.backward()
        optimizer.step()
    return last.item()
