"""Runs a program on the CPU and on the device and compares what it returns."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lazytpu

DEVICES = ("cpu", "tpu")


def close(expected, got, **tolerance) -> None:
    """Compares nests of CPU results with those of the device."""
    torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.is_tpu or pytest.fail(f"a result on {t.device}"), got)
    on_cpu = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.detach().cpu(), got)
    expected = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.detach(), expected)
    torch.testing.assert_close(on_cpu, expected, **tolerance)


def given(device, *shapes, requires_grad=True):
    torch.manual_seed(0)
    tensors = [torch.randn(s).to(device).requires_grad_(requires_grad) for s in shapes]
    return tensors if len(tensors) > 1 else tensors[0]


def mlp(device):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)


def check(program, **tolerance):
    """Runs ``program(device)`` on both devices and compares what it returns."""
    close(program("cpu"), program("tpu"), **tolerance)


def check_refused(program):
    """Runs ``program(device)`` on both devices and compares the first lines of the errors that it raises."""
    messages = []
    for device in DEVICES:
        with pytest.raises(RuntimeError) as caught:
            program(device)
        messages.append(str(caught.value).splitlines()[0])
    assert messages[0] == messages[1]


def ops_of(*tensors):
    """The names of the ops that give tensors, in order."""
    text = lazytpu.ir_text(*tensors)
    return [line.split("= ")[1].split("(")[0] for line in text.splitlines() if "= " in line]
