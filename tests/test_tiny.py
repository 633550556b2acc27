"""Runs first, and fast: if this fails nothing else is worth reading."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import lazytpu


def test_an_op_is_recorded_and_runs_when_read(device: torch.device) -> None:
    x = torch.tensor([1.0, -2.0], device=device)
    before = lazytpu.metrics.counter("execute")
    y = torch.relu(x) + 1
    assert lazytpu.metrics.counter("execute") == before
    assert y.tolist() == [2.0, 1.0]
    assert lazytpu.metrics.counter("execute") == before + 1


def test_gradients(device: torch.device) -> None:
    w = torch.tensor([3.0], device=device, requires_grad=True)
    (w * w).sum().backward()
    assert w.grad is not None and w.grad.item() == 6.0


def test_a_repeated_step_compiles_once(device: torch.device) -> None:
    x = torch.zeros(31, device=device)
    lazytpu.mark_step()
    before = lazytpu.metrics.counter("compile")
    for _ in range(4):
        x.add_(1)
        lazytpu.mark_step()
    assert lazytpu.metrics.counter("compile") == before + 1
    assert x.tolist() == [4.0] * 31


def test_a_cnn_trains_as_on_the_cpu(device: torch.device) -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3))
    net = copy.deepcopy(reference).to(device)
    images, labels = torch.randn(2, 1, 8, 8), torch.tensor([0, 2])
    losses = []
    for model, where in ((reference, torch.device("cpu")), (net, device)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss = F.cross_entropy(model(images.to(where)), labels.to(where))
        loss.backward()
        optimizer.step()
        lazytpu.mark_step()
        losses.append(loss.item())
    torch.testing.assert_close(losses[1], losses[0])
    torch.testing.assert_close([p.cpu() for p in net.parameters()], [*reference.parameters()], rtol=1e-4, atol=1e-5)


def test_a_print(device: torch.device) -> None:
    assert repr(torch.tensor([1.0, 2.5], device=device) * 2) == "tensor([2., 5.], device='tpu:0')"


def test_a_save_and_a_load(device: torch.device, tmp_path: Path) -> None:
    torch.save({"x": torch.arange(3.0, device=device) + 1}, tmp_path / "x.pt")
    loaded = torch.load(tmp_path / "x.pt")["x"]
    assert loaded.device == device and loaded.tolist() == [1.0, 2.0, 3.0]


def test_a_write_through_a_view(device: torch.device) -> None:
    x = torch.zeros(2, 3, device=device)
    x.t()[1:].mul_(0).add_(7)
    assert x.tolist() == [[0.0, 7.0, 7.0], [0.0, 7.0, 7.0]]


def test_a_compiled_step_is_replayed(device: torch.device) -> None:
    w = torch.ones(5, device=device)
    before = lazytpu.metrics.counter("replay")

    @lazytpu.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        w.add_(x)
        return w.sum()

    assert [step(torch.ones(5, device=device)).item() for _ in range(6)] == [10.0, 15.0, 20.0, 25.0, 30.0, 35.0]
    assert lazytpu.metrics.counter("replay") > before
