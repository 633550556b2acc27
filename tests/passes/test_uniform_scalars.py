"""Scalar inputs that are equal in every step are one input of the program, until they differ."""

from __future__ import annotations

import torch
from torch import nn

import lazytpu
from lazytpu.diagnosis import events
from lazytpu.observe import metrics
from lazytpu.passes.uniform_scalars import are_uniform
from lazytpu.tracing import step


def test_equal_parameters_share_one_input(device: torch.device) -> None:
    parameters = [nn.Parameter(torch.full((2, 2), float(i)).to(device)) for i in range(6)]
    optimizer = torch.optim.Adam(parameters, lr=0.1, foreach=True)
    reference = [nn.Parameter(torch.full((2, 2), float(i))) for i in range(6)]
    eager = torch.optim.Adam(reference, lr=0.1, foreach=True)
    step.forget()
    metrics.reset()
    for i in range(6):
        for p, q in zip(parameters, reference, strict=True):
            p.grad, q.grad = torch.ones(2, 2).to(device), torch.ones(2, 2)
        if i == 3:  # one parameter has made fewer steps from now on
            for o, p in ((optimizer, parameters[0]), (eager, reference[0])):
                o.state[p]["step"].fill_(1.0)
        optimizer.step()
        eager.step()
        lazytpu.mark_step()
    for p, q in zip(parameters, reference, strict=True):
        assert torch.allclose(p.cpu(), q)
    graphs = [e.graph for e in events.compilations]
    assert graphs[1].uniform and not graphs[-1].uniform
    assert metrics.counter("compile") == 3 and "now differ" in events.compilations[-1].cause.text


def test_equal_batch_norms_share_one_counter_input(device: torch.device) -> None:
    net = nn.Sequential(*[nn.BatchNorm1d(3) for _ in range(5)]).to(device)
    step.forget()
    metrics.reset()
    for _ in range(3):
        net(torch.ones(4, 3).to(device))
        lazytpu.mark_step()
    counters = [norm.num_batches_tracked for norm in net]
    assert [c.item() for c in counters] == [3] * 5
    assert metrics.counter("compile") == 1
    ((kind, start, stop),) = events.compilations[-1].graph.uniform
    assert kind == "i" and stop - start == 5


def test_counters_that_diverge(device: torch.device) -> None:
    counters = [torch.tensor(0).to(device) for _ in range(5)]
    step.forget()
    metrics.reset()
    wanted = [0] * 5
    for added in ([1] * 5, [4] * 5, [1, 2, 3, 4, 5], [5, 4, 3, 2, 1], [1] * 5):
        for i, n in enumerate(added):
            counters[i] += n
            wanted[i] += n
        lazytpu.mark_step()
        assert [c.item() for c in counters] == wanted
    assert metrics.counter("compile") == 2
    assert "scalar inputs of aten.add.Tensor were all equal" in events.compilations[-1].cause.text


def test_zeros_of_unlike_sign_differ() -> None:
    assert are_uniform([0.0, 0.0, 1.0], [], [("f", 0, 2)]) and are_uniform([0.5, 2.0, 2.0], [], [("f", 1, 3)])
    assert not are_uniform([0.0, -0.0], [], [("f", 0, 2)]) and not are_uniform([1.0, 2.0], [], [("f", 0, 2)])
    assert are_uniform([], [7, 1, 1], [("i", 1, 3)]) and not are_uniform([], [7, 1], [("i", 0, 2)])
