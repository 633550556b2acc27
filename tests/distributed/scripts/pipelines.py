"""Pipelines of stages."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    SplitPoint,
    pipeline,
)
from torch.nn import functional as F

from tests.distributed.scripts.training import Device, batches, contents, end_step, model, script


def staged(device: Device, schedule: Any, parts: int = 1, steps: int = 6) -> Any:
    """Train a pipeline; every rank has ``parts`` stages."""
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers = [*model(8)]
    torch.manual_seed(1)
    if parts == 2:
        split = [layers[:1], layers[1:2], layers[2:3], layers[3:]]
    else:
        split = [layers[:2], layers[2:]]
    stages = [
        PipelineStage(nn.Sequential(*split[i]).to(device), i, n * parts, device) for i in range(rank, n * parts, n)
    ]
    runner = schedule(stages if parts > 1 else stages[0], n_microbatches=4, loss_fn=F.cross_entropy)
    optimizers = [torch.optim.AdamW(stage.submod.parameters(), 1e-2) for stage in stages]
    found: list[Any] = []
    for x, y in batches(device, steps, ranks=1):
        losses: list[torch.Tensor] = []
        first, last = rank == 0, rank == n - 1
        out = runner.step(*([x] if first else []), **({"target": y, "losses": losses} if last else {}))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        end_step(device)
        found += [*losses, *([out.detach()] if last else [])]
    return found, [contents(stage.submod) for stage in stages]


@script("Pipeline: GPipe")
def gpipe(device: Device) -> Any:
    return staged(device, ScheduleGPipe)


@script("Pipeline: 1F1B")
def one_forward_one_backward(device: Device) -> Any:
    return staged(device, Schedule1F1B)


@script("Pipeline: interleaved 1F1B")
def interleaved(device: Device) -> Any:
    return staged(device, ScheduleInterleaved1F1B, parts=2)


@script("Pipeline: split by torch.export")
def exported(device: Device) -> Any:
    rank = dist.get_rank()
    x0, _ = next(batches(device, 1, ranks=1))
    net = model().to(device)
    pipe = pipeline(net, mb_args=(x0[:2],), split_spec={"2": SplitPoint.BEGINNING})
    stage = pipe.build_stage(rank, device)
    runner = ScheduleGPipe(stage, 4, loss_fn=F.cross_entropy)
    found: list[Any] = []
    for x, y in batches(device, 3, ranks=1):
        losses: list[torch.Tensor] = []
        runner.step(*([x] if rank == 0 else []), **({"target": y, "losses": losses} if rank == 1 else {}))
        end_step(device)
        found += losses
    return found, [p.grad for p in stage.submod.parameters()]
