"""A small training, its programs on disk, and running it as a new process would."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import lazytpu
from lazytpu.observe import metrics
from lazytpu.runtime.disk_cache import lookup
from lazytpu.tracing import step

KEY = "0" * 64


def train(steps: int = 3) -> list[float]:
    """A few steps of a small net with dropout and Adam, from the start."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Dropout(0.25), nn.Linear(5, 2)).to(lazytpu.device())
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    x = torch.linspace(-1, 1, 24).reshape(4, 6).to(lazytpu.device())
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        lazytpu.mark_step()
        losses.append(loss.item())
    lookup.settle()
    return losses


def files(place: Path) -> list[Path]:
    return sorted(place.glob("*.lazytpu"))


def counted(*names: str) -> list[int]:
    return [metrics.counter(name) for name in names]


def again() -> list[float]:
    """`train` as a new process would run it: nothing compiled is in memory."""
    step.forget()
    metrics.reset()
    return train()
