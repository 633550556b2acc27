"""What rules choose for TPUs and GPUs compiles for them, where XLA's compiler for them is installed."""

from __future__ import annotations

import ast
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lazytpu
from lazytpu import spmd
from lazytpu.quantization.numbers import integer_conv, integer_linear

CHOICES = ("target_platform", "on_one_cpu", "on_mesh")
PACKAGES = {"v5e:2x2": ["libtpu"], "h100:1": ["jax_cuda12_plugin", "jax_cuda13_plugin"]}


def chooses_by_platform() -> list[torch.Tensor]:
    """Return results of the ops whose rules choose by platform, or by what XLA refuses on one, with gradients."""
    device = lazytpu.device()
    x = torch.rand(8, 4, 8, 8, device=device).requires_grad_()
    rows, whole = x.flatten(1), torch.arange(64, device=device).reshape(8, 8)
    found = [*rows.sort(descending=True, stable=True), rows.argsort(), *rows.topk(5), *rows.topk(5, largest=False)]
    found += [torch.randperm(100, device=device), rows.multinomial(3), F.dropout(rows, 0.5)]
    found += [whole @ whole, whole.short() @ whole.short(), whole.double() @ whole.double()]
    found += [torch.bmm(whole[None], whole[None]), F.conv2d(whole[None, None], whole[None, None, :3, :3])]
    halves = x.bfloat16()
    convolution = nn.Conv2d(4, 8, 3, padding=1, device=device, dtype=torch.bfloat16)
    images, window = (torch.rand(*size, device=device).requires_grad_() for size in ((6, 4, 10, 20), (8, 4, 3, 3)))
    found += [convolution(halves), F.conv2d(x, window), F.interpolate(images, (3, 3), None, "bilinear", antialias=True)]
    found += [F.max_pool2d(x, 2), F.interpolate(x, scale_factor=2.0, mode="bicubic")]
    lstm = nn.LSTM(8, 8, device=device, dtype=torch.bfloat16)
    found.append(lstm(halves[:, 0].transpose(0, 1))[0])
    found.append(F.scaled_dot_product_attention(halves, halves, halves, is_causal=True))
    ends = torch.tensor([2, 6, 8], dtype=torch.int32).to(device)
    weights = torch.rand(3, 256, 16, device=device, dtype=torch.bfloat16).requires_grad_()
    found.append(torch._grouped_mm(halves.flatten(1), weights, offs=ends))
    bytes_ = whole.to(torch.int8)
    found.append(integer_linear(bytes_, bytes_))
    found.append(integer_conv(bytes_[None, None], bytes_[None, None, :3, :3], [1, 1], [0, 0], [1, 1], 1))
    linear = nn.Linear(8, 8, device=device)
    found.append(linear(x))
    found += [
        torch.ones(3, dtype=torch.complex64, device=device) * (1 + 2j),
        rows.detach().double().to(torch.complex128),
    ]
    found += [torch.float_power(x, 2.5), *torch.linalg.svd(x[:, 0])]
    sum(y.float().sum() for y in found if y.requires_grad).backward()
    return [*found, x.grad, images.grad, window.grad, weights.grad, convolution.weight.grad, lstm.weight_hh_l0.grad]


def places_that_choose() -> set[tuple[str, int]]:
    """Return file and line of each place in the rules that asks for the platform."""
    found = set()
    for file in Path(lazytpu.lowering.__path__[0]).rglob("*.py"):
        calls = [n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Call)]
        names = [(n.func.id, n.lineno) for n in calls if isinstance(n.func, ast.Name)]
        found |= {(str(file), line) for name, line in names if name in CHOICES and file.name != "registry.py"}
    return found


def note_places(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, int]]:
    """Let each place that asks for the platform be noted in a set."""
    found = set()

    def noting(choice: Callable[[], Any]) -> Callable[[], Any]:
        def asked() -> Any:
            caller = sys._getframe(1)
            found.add((caller.f_code.co_filename, caller.f_lineno))
            return choice()

        return asked

    for name in CHOICES:
        choice = getattr(lazytpu.lowering.registry, name)
        for module in [m for n, m in sys.modules.items() if n.startswith("lazytpu.lowering.")]:
            if getattr(module, name, None) is choice:
                monkeypatch.setattr(module, name, noting(choice))
    return found


@pytest.mark.parametrize("topology", PACKAGES)
def test_branches_for_a_platform_compile(topology: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not any(map(importlib.util.find_spec, PACKAGES[topology])):
        pytest.skip(f"needs {PACKAGES[topology][0]}")
    held: list[torch.Tensor] = []

    def program() -> None:
        held.extend(chooses_by_platform())
        lazytpu.mark_step()

    asked = note_places(monkeypatch)
    plan = spmd.plan(program, topology, steps=1)
    held.clear()
    assert places_that_choose() - asked == set()
    assert plan.fits and plan.memory.needed > 0
