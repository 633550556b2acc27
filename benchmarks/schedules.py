"""Which steps `lazytpu.compile` compiles, and which it replays, for every optimizer with every scheduler of torch.

    python -m benchmarks.schedules [OPTIMIZER ...]

prints for each pair the compilations and replays of each of 14 steps, and the largest difference to the same training
on the CPU.  It fails where a pair compiles after the fourth step or does not end in replays; Adafactor reads a tensor
in each step, so it is recorded.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import optim
from torch.optim import lr_scheduler as s

import lazytpu

STEPS, WARM = 14, 4
RECORDED = {"Adafactor"}
OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "SGD": lambda p: optim.SGD(p, 0.01),
    "SGD momentum": lambda p: optim.SGD(p, 0.01, momentum=0.9),
    "SGD nesterov": lambda p: optim.SGD(p, 0.01, momentum=0.9, nesterov=True),
    "Adam": lambda p: optim.Adam(p, 0.01),
    "Adam amsgrad": lambda p: optim.Adam(p, 0.01, amsgrad=True),
    "AdamW": lambda p: optim.AdamW(p, 0.01),
    "AdamW foreach": lambda p: optim.AdamW(p, 0.01, foreach=True),
    "AdamW fused": lambda p: optim.AdamW(p, 0.01, fused=True),
    "RMSprop": lambda p: optim.RMSprop(p, 0.01),
    "RMSprop centered": lambda p: optim.RMSprop(p, 0.01, momentum=0.9, centered=True),
    "Adagrad": lambda p: optim.Adagrad(p, 0.01),
    "NAdam": lambda p: optim.NAdam(p, 0.01),
    "RAdam": lambda p: optim.RAdam(p, 0.01),
    "Adamax": lambda p: optim.Adamax(p, 0.01),
    "Adadelta": lambda p: optim.Adadelta(p, 0.01),
    "Rprop": lambda p: optim.Rprop(p, 0.01),
    "ASGD": lambda p: optim.ASGD(p, 0.01),
    "Adafactor": lambda p: optim.Adafactor(p, 0.01),
}
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "none": lambda o: None,
    "CyclicLR": lambda o: s.CyclicLR(o, 0.001, 0.01, step_size_up=3, cycle_momentum=False),
    "CyclicLR momentum": lambda o: s.CyclicLR(o, 0.001, 0.01, step_size_up=3, cycle_momentum=True),
    "OneCycleLR momentum": lambda o: s.OneCycleLR(o, 0.01, total_steps=60, cycle_momentum=True),
    "StepLR(2)": lambda o: s.StepLR(o, 2, 0.9),
    "ReduceLROnPlateau": lambda o: s.ReduceLROnPlateau(o, patience=0, factor=0.9),
    "CosineAnnealingWarmRestarts": lambda o: s.CosineAnnealingWarmRestarts(o, 5),
    "LambdaLR": lambda o: s.LambdaLR(o, lambda epoch: 1 / (1 + epoch)),
    "SequentialLR": lambda o: s.SequentialLR(o, [s.LinearLR(o, 0.1, total_iters=4), s.ExponentialLR(o, 0.95)], [4]),
    "ChainedScheduler": lambda o: s.ChainedScheduler([s.ConstantLR(o, 0.1, 3), s.ExponentialLR(o, 0.9)]),
}


def train(optimizer: str, scheduler: str, device: torch.device, compiled: bool) -> tuple[str, str, list[float]]:
    """Return the compilations and the replays of each step, a digit each, and the losses."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2)).to(device)
    made = OPTIMIZERS[optimizer](net.parameters())
    schedule = SCHEDULERS[scheduler](made)

    def step(x: torch.Tensor) -> torch.Tensor:
        made.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        made.step()
        return loss.detach()

    call = lazytpu.compile(step) if compiled else step
    x = torch.linspace(-1, 1, 15).reshape(5, 3).to(device)
    rows, losses = [], []
    for i in range(STEPS):
        before = [lazytpu.metrics.counter(name) for name in ("compile", "replay")]
        losses.append(call(x))
        if schedule is not None:
            schedule.step(*([float(i // 2)] if isinstance(schedule, s.ReduceLROnPlateau) else []))
        rows.append([lazytpu.metrics.counter(n) - old for n, old in zip(("compile", "replay"), before, strict=True)])
    compiles, replays = ["".join(str(row[i]) for row in rows) for i in range(2)]
    return compiles, replays, [float(loss) for loss in losses]


def check(optimizer: str, scheduler: str) -> bool:
    """Print one pair; return whether it does what it should."""
    lazytpu.tracing.step.forget()
    try:
        _, _, wanted = train(optimizer, scheduler, torch.device("cpu"), compiled=False)
    except ValueError as error:  # no momentum to cycle
        print(f"{optimizer:18} {scheduler:28} {error}")
        return True
    compiles, replays, losses = train(optimizer, scheduler, lazytpu.device(), compiled=True)
    off = max(abs(a - b) for a, b in zip(losses, wanted, strict=True))
    good = off < 1e-4 and (optimizer in RECORDED or (set(compiles[WARM:]) == {"0"} and replays.endswith("1" * 8)))
    verdict = "" if good else "  FAILS"
    print(f"{optimizer:18} {scheduler:28} compiles {compiles}  replays {replays}  off by {off:.0e}{verdict}")
    return good


def main(chosen: list[str]) -> int:
    """Print all pairs, or those of the chosen optimizers."""
    warnings.simplefilter("ignore")  # schedulers warn of steps that they do not see
    lazytpu.config.compile_after, lazytpu.config.disk_cache = 1, False
    results = [check(optimizer, scheduler) for optimizer in chosen or OPTIMIZERS for scheduler in SCHEDULERS]
    print(f"{sum(results)} of {len(results)} as they should be")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
