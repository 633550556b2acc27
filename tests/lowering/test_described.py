"""What rules choose for TPUs and GPUs compiles for them, where XLA's compiler for them is installed."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lazytpu
from lazytpu import spmd

PACKAGES = {"v5e:2x2": ["libtpu"], "h100:1": ["jax_cuda12_plugin", "jax_cuda13_plugin"]}


def chooses_by_platform() -> list[torch.Tensor]:
    """Return results of the ops whose rules look at `target_platform`, with gradients."""
    device = lazytpu.device()
    x = torch.rand(8, 4, 16, 16, device=device).requires_grad_()
    rows, whole = x.flatten(1), torch.arange(64, device=device).reshape(8, 8)
    found = [*rows.sort(descending=True, stable=True), rows.argsort(), *rows.topk(5), *rows.topk(5, largest=False)]
    found += [torch.randperm(100, device=device), rows.multinomial(3), F.dropout(rows, 0.5)]
    found += [whole @ whole, whole.short() @ whole.short(), whole.double() @ whole.double()]
    found += [torch.bmm(whole[None], whole[None]), F.conv2d(whole[None, None], whole[None, None, :3, :3])]
    halves = x.bfloat16()
    convolution = nn.Conv2d(4, 8, 3, padding=1, device=device, dtype=torch.bfloat16)
    found += [convolution(halves), F.max_pool2d(x, 2), F.interpolate(x, scale_factor=2.0, mode="bicubic")]
    lstm = nn.LSTM(16, 8, device=device, dtype=torch.bfloat16)
    found.append(lstm(halves[:, 0].transpose(0, 1))[0])
    found.append(F.scaled_dot_product_attention(halves, halves, halves, is_causal=True))
    ends = torch.tensor([2, 6, 8], dtype=torch.int32).to(device)
    weights = torch.rand(3, 1024, 16, device=device, dtype=torch.bfloat16).requires_grad_()
    found.append(torch._grouped_mm(halves.flatten(1), weights, offs=ends))
    sum(y.float().sum() for y in found if y.requires_grad).backward()
    return [*found, x.grad, weights.grad, convolution.weight.grad, lstm.weight_hh_l0.grad]


@pytest.mark.parametrize("topology", PACKAGES)
def test_branches_for_a_platform_compile(topology: str) -> None:
    if not any(map(importlib.util.find_spec, PACKAGES[topology])):
        pytest.skip(f"needs {PACKAGES[topology][0]}")
    held: list[torch.Tensor] = []

    def program() -> None:
        held.extend(chooses_by_platform())
        lazytpu.mark_step()

    plan = spmd.plan(program, topology, steps=1)
    held.clear()
    ops = {node.op.name for program in plan.programs for node in program.compiled.graph.nodes}
    wanted = {"sort.stable", "topk", "randperm", "multinomial", "aten.mm", "convolution_backward", "_grouped_mm"}
    assert all(any(word in op for op in ops) for word in wanted), ops
    assert plan.fits and plan.memory.needed > 0
