"""Long chains of elementwise ops: no loop of the program holds all of one, whoever reads its links."""

import re

import pytest
import torch

import lazytpu
from lazytpu.ir.tree import Value, operands
from lazytpu.lowering import chains, lower
from lazytpu.tracing.reading import pending_graph

STEPS = 96


def simulated(x: torch.Tensor, steps: int = STEPS) -> list[torch.Tensor]:
    read = []
    for i in range(steps):
        x = x + torch.sin(x) * 0.1
        if i % 8 == 7:
            read.append(x * 2)
    return read


def longest(text: str) -> int:
    """Return the lines of the longest computation of an HLO program that is a fusion."""
    return max(len(part.splitlines()) for part in re.split(r"\n\n", text) if part.lstrip().startswith("%fused"))


def test_links_are_no_further_apart_than_some_hundred_ops(device: torch.device) -> None:
    read = simulated(torch.zeros(4).to(device), 200)
    graph = pending_graph()
    kept = chains.links_to_keep(graph)
    length: dict[Value, int] = {}
    for node in graph.nodes:
        before = max([length.get(x, 0) for x in operands(node) if type(x) is Value], default=0)
        length[node.value] = 0 if node.value in kept else before + 1
    assert 200 * 3 // chains._LONGEST - 1 <= len(kept) <= 200 * 3 // chains._LONGEST + 1
    assert max(length.values()) <= chains._LONGEST + 3
    del read


def test_short_chains_and_links_that_one_op_reads_are_left_alone(device: torch.device) -> None:
    x = torch.zeros(4).to(device)
    short = simulated(x, chains._LONGEST // 3 - 1)
    assert not chains.links_to_keep(pending_graph())
    del short
    lazytpu.mark_step()
    y = x + 1
    for _ in range(200):
        y = torch.sin(y)
    assert not chains.links_to_keep(pending_graph())


def test_no_loop_holds_the_whole_chain(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.linspace(0, 1, 8)
    read = simulated(x.to(device))
    text = lazytpu.hlo_text(optimized=True)
    with monkeypatch.context() as patch:
        patch.setattr(lower, "links_to_keep", lambda graph: frozenset())
        assert 2 * longest(text) < longest(lazytpu.hlo_text(optimized=True))
    for found, expected in zip(read, simulated(x), strict=True):
        torch.testing.assert_close(found.cpu(), expected)
