"""What measuring costs:  python -m benchmarks.metrics_cost

A training step with `lazytpu.config.metrics`, and with a file of steps, on and off in turn.  Blocks of steps alternate,
the two of a pair in changing order, so that whatever else the machine does meets both.  The figure of a model is the
median over the pairs of the ratio on / off: of processor time of the whole process, of that of the main thread, and of
wall time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch.nn.functional as F

import lazytpu
from benchmarks.models import make, optimizer
from benchmarks.page import machine

_CLOCKS: tuple[Callable[[], float], ...] = (time.process_time, time.thread_time, time.perf_counter)


@dataclass(frozen=True, slots=True)
class Cost:
    """Ratios on / off, the medians of all pairs.

    Attributes:
        cpu, thread, wall: of processor time, that of the main thread, and wall time.
        spread: half the distance of the quartiles of ``cpu``, divided by the root of the number of pairs.
    """

    cpu: float
    thread: float
    wall: float
    spread: float


def trainer(model: str, compiled: bool) -> Callable[[], Any]:
    """A function that runs one training step of a model."""
    work = make(model)
    device = lazytpu.device()
    net, x, target = work.net.to(device), work.x.to(device), work.target.to(device)
    update = optimizer(work.optimizer, net.parameters())

    def train(x: Any, target: Any) -> Any:
        update.zero_grad()
        loss = F.cross_entropy(net(x), target)
        loss.backward()
        update.step()
        return loss.detach()

    if compiled:
        step = lazytpu.compile(train)
        return lambda: step(x, target)

    def traced() -> Any:
        loss = train(x, target)
        lazytpu.mark_step()
        return loss

    return traced


def cost(step: Callable[[], Any], switch: Callable[[bool], None], pairs: int, block_s: float) -> Cost:
    """What switching something on costs a step.

    Args:
        switch: switches it on or off.
        pairs: how many blocks with and without it.
        block_s: how long a block takes.
    """
    for on in (True, False) * 4:
        switch(on)
        step()
    lazytpu.wait()
    began = time.perf_counter()
    for _ in range(10):
        step()
    lazytpu.wait()
    steps = max(1, round(10 * block_s / (time.perf_counter() - began)))
    ratios = []
    for pair in range(pairs):
        spent = {}
        for on in (pair % 2 == 0, pair % 2 == 1):
            switch(on)
            before = [clock() for clock in _CLOCKS]
            for _ in range(steps):
                step()
            lazytpu.wait()
            spent[on] = [clock() - start for clock, start in zip(_CLOCKS, before, strict=True)]
        ratios.append([a / b for a, b in zip(spent[True], spent[False], strict=True)])
    switch(False)
    by_clock = list(zip(*ratios, strict=True))
    low, _, high = statistics.quantiles(by_clock[0], n=4)
    return Cost(*map(statistics.median, by_clock), (high - low) / 2 / len(ratios) ** 0.5)


def switches(folder: Path) -> dict[str, Callable[[bool], None]]:
    """What can be switched on, by name; ``nothing`` shows how far from 1 the machine alone brings a ratio."""

    def metrics(on: bool) -> None:
        lazytpu.config.metrics = on

    def file(on: bool) -> None:
        lazytpu.config.metrics_file = str(folder / "steps.jsonl") if on else ""

    return {"nothing": lambda on: None, "metrics": metrics, "metrics_file": file}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.metrics_cost", description=__doc__)
    parser.add_argument("models", nargs="*", default=["mlp", "deepmlp", "gpt"])
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--block-s", type=float, default=0.3, help="seconds of a block")
    parser.add_argument("--compiled", action="store_true", help="the step as one program, by lazytpu.compile")
    options = parser.parse_args(arguments)
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        for model in options.models:
            step = trainer(model, options.compiled)
            for name, switch in switches(Path(folder)).items():
                found = cost(step, switch, options.pairs, options.block_s)
                print(json.dumps({"model": model, "on": name, **{k: round(v, 4) for k, v in asdict(found).items()}}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
