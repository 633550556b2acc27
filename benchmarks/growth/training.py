"""Training for long leaks nothing: neither memory, nor buffers, nor Python objects."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

import lazytpu
from benchmarks.growth.process import Held, held
from benchmarks.growth.study import Points, Study, Verdict, growth_in_second_half, spread

STEPS = 10_000
_SAMPLES = 40
_MEMORY_MB = 4.0
_OBJECTS = 100


def study(steps: int = STEPS) -> Study:
    """What the process holds over a training, traced every step and as one compiled function."""
    series: dict[str, Points] = {}
    verdicts = []
    for name, compiled in (("traced", False), ("compiled", True)):
        found = train(steps, compiled)
        series[f"{name}, resident MiB"] = [(step, now.rss_mb) for step, now in found]
        later = [now for _, now in found[len(found) // 4 :]]
        gained = growth_in_second_half(series[f"{name}, resident MiB"])
        verdicts += [
            Verdict(f"{name}: MiB gained in the second half", gained, _MEMORY_MB),
            Verdict(f"{name}: most live buffers less fewest", spread([now.buffers for now in later]), 0),
            Verdict(f"{name}: most Python objects less fewest", spread([now.objects for now in later]), _OBJECTS),
        ]
    title = "Training for long leaks nothing"
    return Study("training", title, "steps", "resident MiB", series, False, verdicts)


def train(steps: int, compiled: bool) -> list[tuple[int, Held]]:
    """Trains a small network with dropout, batch norm, AdamW and a schedule; what is held after each part."""
    torch.manual_seed(0)
    device = lazytpu.device()
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 4)).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / steps))
    inputs, targets = torch.randn(16, 8).to(device), torch.randint(0, 4, (16,)).to(device)

    def train_step(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), target)
        loss.backward()
        optimizer.step()
        return loss.detach()

    run: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lazytpu.compile(train_step) if compiled else train_step
    found = []
    for step in range(steps):
        loss = run(inputs, targets)
        schedule.step()
        lazytpu.mark_step()
        if (step + 1) % (steps // _SAMPLES) == 0:
            del loss
            lazytpu.wait()
            found.append((step + 1, held()))
    return found
