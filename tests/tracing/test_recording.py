"""What is recorded a second time costs nothing new, and what grows without end is cut or forgotten."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lazytpu
from lazytpu.dispatch import general
from lazytpu.ir.tree import trace
from lazytpu.tracing import record, sample_tensors


class Counts:
    """How many nodes were made, types inferred and torch's kernels asked on samples, since the last look."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.inferred = 0
        self._nodes = trace.nodes
        for module, name in ((record, "infer"), (general, "sample_in_storage"), (sample_tensors, "sample_in_storage")):
            monkeypatch.setattr(module, name, self._counted(getattr(module, name)))

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.inferred += 1
            return function(*args, **kwargs)

        return counted

    def new(self) -> tuple[int, int]:
        found = trace.nodes - self._nodes, self.inferred
        self._nodes, self.inferred = trace.nodes, 0
        return found


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    return Counts(monkeypatch)


def training(device: torch.device) -> Callable[[], None]:
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3)).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    x, y = torch.randn(4, 1, 6, 6), torch.tensor([0, 1, 2, 0])

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x.to(device)), y.to(device)).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        schedule.step()

    return step


def views_and_writes(device: torch.device) -> Callable[[], None]:
    x, mask = torch.arange(12.0, device=device).reshape(3, 4).clone(), torch.ones(3, dtype=torch.bool, device=device)

    def step() -> None:
        x.t()[1:].add_(1)
        x[0].copy_(x[1])
        x[:, ::2].mul_(2.5)
        x.view(-1)[3:5].fill_(7)
        x[1].masked_fill_(mask.new_ones(4), 3)
        torch.add(x[2], 1, out=x[0])
        x.diagonal().zero_()
        for part in x.chunk(2, 1):
            part.sub_(1)
        x.t_().unsqueeze_(0).squeeze_(0).t_()
        x.expand(2, 3, 4).sum().item()

    return step


@pytest.mark.parametrize("program", [training, views_and_writes])
def test_a_path_that_repeats_makes_no_node_and_infers_no_type(
    program: Callable[[torch.device], Callable[[], None]], device: torch.device, counts: Counts
) -> None:
    step = program(device)
    made = []
    for _ in range(5):
        step()
        lazytpu.mark_step()
        made.append(counts.new())
    assert made[0][0] > 10 and made[0][1] > 10  # it counts
    assert made[3:] == [(0, 0), (0, 0)]


def test_a_graph_past_the_limit_is_cut_by_itself(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazytpu.config, "max_graph_ops", 20)
    cuts = lazytpu.metrics.counter("cut")

    def program(on: Any) -> torch.Tensor:
        x, y = torch.zeros(3, 4, device=on), torch.arange(12.0, device=on).reshape(3, 4)
        for i in range(15):
            x.t()[1].add_(i)
            x[0, 1:].copy_(y.t()[:3, 2])
            y = y - x
            y[1:, ::2].view_as(y[1:, ::2]).mul_(-1)
            torch.add(y[0], x[1], out=x[2])
            torch._foreach_add_([x, y], [y, y], alpha=0)
        return x + y

    for _ in range(2):  # on known paths too
        assert torch.equal(program(device).cpu(), program("cpu"))
        assert trace.cursor.depth <= 40
    assert lazytpu.metrics.counter("cut") - cuts >= 10


def test_the_tree_is_forgotten_past_the_limit(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazytpu.config, "max_tree_nodes", 30)
    x = torch.zeros(4, device=device)
    compiles = []
    for _ in range(4):
        for n in range(1, 6):  # five graphs of which the tree holds a few
            for _ in range(3 * n):
                x = x + 1
            x[1:].mul_(2)
            lazytpu.mark_step()
            assert trace.nodes <= 30 + 20
        compiles.append(lazytpu.metrics.counter("compile"))
    expected = torch.zeros(4)
    for _ in range(4):
        for n in range(1, 6):
            expected = expected + 3 * n
            expected[1:].mul_(2)
    assert x.tolist() == expected.tolist()
    assert compiles[1:] == compiles[1:2] * 3  # the executables are found again


def test_views_past_the_limit_are_forgotten(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from lazytpu.tensors import layout

    monkeypatch.setattr(layout, "MAX_CHILDREN", 8)
    x = torch.arange(60.0, device=device)
    parts = [x[i : i + 3] for i in range(50)]
    for part in parts[::7]:
        part.add_(100)
    expected = torch.arange(60.0)
    for i in range(0, 50, 7):
        expected[i : i + 3] += 100
    assert x.tolist() == expected.tolist()
    assert [p.tolist() for p in parts[:9]] == [expected[i : i + 3].tolist() for i in range(9)]
    assert len(x._s.layout.by_geometry) <= 8 and len(x._s.layout.children) <= 8


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="collects in small parts")
def test_pythons_collections_come_between_steps(device: torch.device) -> None:
    """In the middle of a step they would take its tensors for old objects, and those bring on full collections."""
    x = torch.ones(2).to(device)
    within: list[bool] = []

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 1:
            within.append(bool(trace.inputs))

    def step() -> None:
        held = [x + 1 for _ in range(400)]  # some 2,000 objects, three collections of generation 0
        del held
        lazytpu.mark_step()

    for _ in range(20):
        step()
    gc.callbacks.append(note)
    try:
        for _ in range(40):
            step()
    finally:
        gc.callbacks.remove(note)
    assert len(within) >= 5 and sum(within) <= 1, within


@pytest.mark.parametrize(
    "sizes, dim",
    [
        ([(2, 3), (2, 1)], 1),
        ([(1, 2, 3, 4), (1, 2, 1, 4)], -2),
        ([(0,), (2, 3)], 0),  # torch leaves out what is empty and has one dimension
        ([(2, 3), (2, 0)], 1),
        ([(2, 1, 1, 1)] * 2, 1),
        ([(2, 3), (3, 3)], 1),
        ([(2, 3), (2, 3, 1)], 0),
        ([(2, 3)] * 2, 2),
        ([()] * 2, 0),
    ],
)
def test_joined_tensors_are_those_of_the_cpu(device: torch.device, sizes: list[tuple[int, ...]], dim: int) -> None:
    def joined(where: torch.device | str, dtypes: list[torch.dtype]) -> Any:
        parts = [torch.ones(size, dtype=dtype).to(where) for size, dtype in zip(sizes, dtypes, strict=True)]
        try:
            made = torch.cat(parts, dim)
        except Exception as error:
            return type(error), str(error)
        return made.shape, made.stride(), made.dtype, made.cpu().tolist()

    for dtypes in ([torch.float32] * 2, [torch.float16, torch.int64]):
        assert joined(device, dtypes) == joined("cpu", dtypes)
