"""Forced cuts, reads that wait and ops on the CPU are counted by line, with what the program wrote there."""

from __future__ import annotations

import pytest
import torch

import lazytpu
from lazytpu.diagnosis import events
from lazytpu.dispatch import cpu_fallback
from lazytpu.runtime import transfers
from tests.support.explanations import Explanations

explained = Explanations(__file__)


def test_nothing_to_say() -> None:
    assert lazytpu.explain() == "nothing was compiled"


def test_cuts_and_reads(device: torch.device) -> None:
    x = torch.ones(3).to(device)
    for _ in range(2):
        y = x.sinh()
        if y.sum() > 0:  # [bool]
            y = y + 1
        lazytpu.mark_step()
        y.tolist()  # [list]
        lazytpu.wait()  # [wait]
    text = explained.section("cuts forced in the middle of a step")
    assert text.splitlines()[0] == "  2 x bool (if) at [bool], waited # ms for the device"
    reads = text.partition("reads that waited for a running step\n")[2].splitlines()
    assert sorted(reads) == [
        "  2 x copy to the CPU at [list], waited # ms for the device",
        "  2 x wait at [wait], waited # ms for the device",
    ]


def test_read_in_the_backward_pass(device: torch.device) -> None:
    x = torch.ones(3).to(device).requires_grad_()
    mask = x > 0
    x.tanh()[mask].sum().backward()  # [masked]
    text = explained.section("reads that waited for a running step")
    assert "  1 x aten.nonzero at [masked], waited # ms for the device" in text


def test_cut_of_a_graph_that_grew_too_large(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazytpu.config, "max_graph_ops", 3)
    y = torch.ones(3).to(device)
    for _ in range(5):
        y = y.sinh()  # [grow]
    lazytpu.mark_step()
    assert "  1 x max_graph_ops at [grow]" in explained.section("cuts forced in the middle of a step")


def test_time_waited_is_that_of_the_device(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1000))
    monkeypatch.setattr(transfers.time, "perf_counter", lambda: float(next(clock)))
    torch.ones(3).to(device).sinh().sum().item()
    monkeypatch.undo()
    ((_, tally),) = events.cuts.items()
    assert tally.count == 1 and tally.seconds == 1.0  # one tick from the beginning of the wait to its end


@pytest.mark.filterwarnings("ignore:.*runs on the CPU")
def test_fallback(device: torch.device) -> None:
    op = cpu_fallback.fallback(torch.ops.aten.cos.default)
    x = torch.ones(3).to(device)
    for _ in range(2):
        op(x)  # [fallback]
    assert (
        explained.section("ops without a lowering, which ran on the CPU")
        == "  2 x aten.cos at [fallback], on the CPU for # ms"
    )
    assert lazytpu.metrics.fallbacks() == {"aten.cos": 2} and lazytpu.metrics.counter("fallback") == 2
