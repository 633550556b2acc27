"""Attention of DTensor, and context parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import _attention as options
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional as F

from tests.distributed.scripts.dtensor import mesh_of
from tests.distributed.scripts.training import Device, script


def of_heads(device: Device, rows: int = 6) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(4, 4, rows, 8).to(device) for _ in range(3)]


def attended(x: list[torch.Tensor], causal: bool) -> list[torch.Tensor]:
    """Return attention and its gradients."""
    x = [t.detach().requires_grad_() for t in x]
    y = F.scaled_dot_product_attention(*x, is_causal=causal)
    (y * y).sum().backward()
    return [y.detach(), *[t.grad for t in x]]  # type: ignore[list-item]


@script("DTensor: attention, split by batch, by heads and not at all")
def split(device: Device) -> Any:
    found = []
    for placement in (Shard(0), Shard(1), Replicate()):
        x = of_heads(device)
        if device.type == "cpu":  # where torch tries rules for seconds
            found += attended(x, placement.is_shard(0))
            continue
        parts = [distribute_tensor(t, mesh_of(device), [placement]) for t in x]
        for t in attended(parts, placement.is_shard(0)):
            assert isinstance(t, DTensor) and t.placements == (placement,)
            found.append(t.full_tensor())
    return found


def in_context(device: Device, method: str, causal: bool) -> Any:
    x, mesh = of_heads(device, 16), mesh_of(device)
    if device.type == "cpu":  # torch has it for CUDA only: the same in one process
        return attended(x, causal)
    options.set_rotate_method(method)
    options._cp_options.enable_load_balance = causal  # torch has it for causal attention
    with context_parallel(mesh, buffers=x, buffer_seq_dims=[2] * 3, no_restore_buffers=set(x)):
        found = attended(x, causal)
    return [*options.context_parallel_unshard(mesh, found, [2] * 4)]


@script("Context parallel: keys and values gathered, causal, in balance")
def gathered(device: Device) -> Any:
    return in_context(device, "allgather", True)


@script("Context parallel: keys and values go round")
def around(device: Device) -> Any:
    return in_context(device, "alltoall", False)


@script("Context parallel: go round, causal, in balance (4)")
def around_in_balance(device: Device) -> Any:
    return in_context(device, "alltoall", True)
