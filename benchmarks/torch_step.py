"""Times a training step on one backend of torch, in this process:  python -m benchmarks.torch_step BACKEND MODEL

Prints one line of JSON, the fields of `benchmarks.timing.Timing`.  `benchmarks.compare` runs it.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.models import make, optimizer
from benchmarks.timing import Timing, time_steps

BACKENDS = ("eager", "inductor", "cuda", "torch_xla", "lazytpu", "lazytpu-compile")
Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Backend:
    """A way to run a training step.

    Attributes:
        device: where tensors are.
        cut: ends the graph of a step that was recorded.
        wait: returns when the device has done everything.
        compiles: how many programs were compiled so far.
        of_step: makes another function of the whole step.
        of_net: makes another function of the network.
    """

    device: torch.device
    cut: Callable[[], Any] = _nothing
    wait: Callable[[], Any] = _nothing
    compiles: Callable[[], int] = field(default=lambda: 0)
    of_step: Callable[[Step], Step] = field(default=lambda step: step)
    of_net: Callable[[Any], Any] = field(default=lambda net: net)


def backend(name: str) -> Backend:
    """The backend of a name; imports what it needs.

    Raises:
        ValueError: there is none of that name.
    """
    if name == "eager":
        return Backend(torch.device("cpu"))
    if name == "inductor":
        return Backend(torch.device("cpu"), of_net=torch.compile)
    if name == "cuda":
        return Backend(torch.device("cuda"), wait=torch.cuda.synchronize)
    if name == "torch_xla":
        os.environ.setdefault("PJRT_DEVICE", "CPU")
        import torch_xla
        import torch_xla.core.xla_model as xm
        from torch_xla.debug.metrics import counter_value

        def compiles() -> int:
            return counter_value("UncachedCompile") or 0

        return Backend(torch_xla.device(), torch_xla.sync, xm.wait_device_ops, compiles)
    if name in ("lazytpu", "lazytpu-compile"):
        import lazytpu

        def compiled() -> int:
            return lazytpu.metrics.counter("compile")

        if name == "lazytpu-compile":
            return Backend(lazytpu.device(), wait=lazytpu.wait, compiles=compiled, of_step=lazytpu.compile)
        return Backend(lazytpu.device(), lazytpu.mark_step, lazytpu.wait, compiled)
    raise ValueError(f"unknown backend {name!r}; one of {', '.join(BACKENDS)}")


def time_model(name: str, on: Backend, first_only: bool = False, run_s: float = 1.0) -> Timing:
    """Times the training step of a model: forward, backward and optimizer."""
    work = make(name)
    net, x, target = work.net.to(on.device), work.x.to(on.device), work.target.to(on.device)
    update = optimizer(work.optimizer, net.parameters())
    forward = on.of_net(net)

    def train(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        update.zero_grad()
        loss = F.cross_entropy(forward(x), target)
        loss.backward()
        update.step()
        return loss.detach()

    run = on.of_step(train)

    def step() -> torch.Tensor:
        loss = run(x, target)
        on.cut()
        return loss

    return time_steps(step, on.wait, on.compiles, first_only, run_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("backend", choices=BACKENDS)
    parser.add_argument("model")
    parser.add_argument("--first-only", action="store_true", help="stop after the first step")
    parser.add_argument("--run-s", type=float, default=1.0, help="seconds of each of the seven runs")
    options = parser.parse_args()
    timing = time_model(options.model, backend(options.backend), options.first_only, options.run_s)
    print(json.dumps({**timing.as_dict(), "versions": {"torch": torch.__version__}}))


if __name__ == "__main__":
    main()
