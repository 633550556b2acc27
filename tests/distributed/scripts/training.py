"""What the scripts train: a small model, batches that are others on each rank, and a loop of ten steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import lazytpu

Device = torch.device
Script = Callable[[Device], Any]
STEPS = 10
scripts: dict[str, Script] = {}
"""All scripts of this folder, by name; the names of those of four processes end with ``(4)``."""


tolerances: dict[str, float] = {}
"""Of scripts that train in half precision."""


def script(name: str, rtol: float = 5e-4) -> Callable[[Script], Script]:
    """Register a script under a name; results may differ by a part of their size, and a tenth of it more."""

    def register(run: Script) -> Script:
        scripts[name], tolerances[name] = run, rtol
        return run

    return register


class Block(nn.Module):
    """A residual block, with a norm."""

    def __init__(self, width: int, inner: int = 0) -> None:
        super().__init__()
        inner = inner or 2 * width
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def model(width: int = 8, inner: int = 0) -> nn.Sequential:
    """Return a model of six inputs and four classes, with the same parameters on each rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), Block(width, inner), Block(width, inner), nn.Linear(width, 4))


def batches(device: Device, steps: int = STEPS, ranks: int = 0, place: int = 0) -> Iterator[list[torch.Tensor]]:
    """Yield this rank's part of each batch.

    Args:
        ranks, place: among how many the batches are shared out, and which part is this one's; by default all ranks.
    """
    ranks, place = (ranks, place) if ranks else (dist.get_world_size(), dist.get_rank())
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        x, y = torch.randn(8, 6, generator=generator), torch.randint(0, 4, (8,), generator=generator)
        part = slice(place * 8 // ranks, (place + 1) * 8 // ranks)
        yield [x[part].to(device), y[part].to(device)]


def train(
    net: nn.Module,
    device: Device,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    every: int = 1,
    between: Callable[[bool], AbstractContextManager[None] | None] = lambda last: None,
    clip: float = 0.0,
    steps: int = STEPS,
    loss_of: Callable[..., torch.Tensor] = F.cross_entropy,
    **parts: int,
) -> list[torch.Tensor]:
    """Train for ten steps.

    Args:
        optimizer: AdamW by default.
        every: how many batches make a step.
        between: called before each batch, with whether it is the last one of a step; may return a context for it.
        clip: the norm that gradients are clipped to, 0 for none.
        parts: for `batches`.

    Returns:
        The losses, over all ranks.
    """
    optimizer = optimizer or torch.optim.AdamW(net.parameters(), 1e-2)
    losses = []
    for i, (x, y) in enumerate(batches(device, steps * every, **parts), 1):
        last = i % every == 0
        with between(last) or nullcontext():
            loss = loss_of(net(x), y) / every
            loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total)
        if last:
            if clip:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            gradients = [None if p.grad is None else p.grad.detach().clone() for p in net.parameters()]
            optimizer.step()
            optimizer.zero_grad()
            end_step(device)
    return [*losses, *gradients]


def end_step(device: Device) -> None:
    """End a step on the device."""
    if device.type != "cpu":
        lazytpu.mark_step()


def contents(net: nn.Module) -> list[torch.Tensor]:
    """Return the parameters and buffers of a model, local parts of those that are distributed."""
    found = [x.detach() for x in (*net.parameters(), *net.buffers())]
    return [x.to_local() if hasattr(x, "to_local") else x for x in found]
