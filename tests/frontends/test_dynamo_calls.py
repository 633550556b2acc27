"""torch.compile(backend="lazytpu"): what a call does once its graph is compiled."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lazytpu
from lazytpu.frontends.dynamo import entry
from lazytpu.frontends.dynamo.compiled import CompiledGraph
from lazytpu.frontends.dynamo.direct import direct_call
from tests.support.dynamo_marks import FRESH

pytestmark = FRESH


def test_a_warm_call_takes_inputs_in_every_state(device, monkeypatch):
    layer = nn.Linear(4, 3).to(device)
    compiled = torch.compile(layer, backend="lazytpu")
    batch = torch.arange(8.0).reshape(2, 4)

    def check(x):
        wanted = F.linear(x.detach().cpu(), layer.weight.detach().cpu(), layer.bias.detach().cpu())
        assert torch.allclose(compiled(x).cpu(), wanted, atol=1e-6)

    with torch.no_grad():
        for _ in range(4):
            check(batch.to(device))
        before = [lazytpu.metrics.counter(name) for name in ("cache_hit", "execute", "compile")]
        compiled(batch.to(device))
        assert [lazytpu.metrics.counter(n) for n in ("cache_hit", "execute", "compile")] == [
            before[0] + 1,
            before[1] + 1,
            before[2],
        ]
        check(batch.to(device) * 2)  # pending
        for _ in range(4):
            check(batch.to(device).repeat(2, 1)[1:3])  # a view
        check(batch.to(device))
        check(batch.to(device).t().contiguous().t())  # other strides
        check(torch.zeros(2, 4, device=device))
        layer.weight.mul_(2)  # pending, not an argument of this step yet
        check(batch.to(device))
        layer.weight.data = torch.ones(3, 4).to(device)
        check(batch.to(device))
        moved = torch.zeros(2, device=device).resize_(2, 4)
        moved.copy_(batch)
        check(moved)
        monkeypatch.setattr(lazytpu.config, "matmul_precision", "default")
        check(batch.to(device))
        monkeypatch.setattr(lazytpu.config, "check_bounds", True)
        check(batch.to(device))


@pytest.mark.parametrize("wrap", [lazytpu.compile, lambda f: torch.compile(f, backend="lazytpu")])
def test_another_lowering_is_another_program(device, monkeypatch, wrap):
    convolve = wrap(lambda x, w: torch.nn.functional.conv2d(x, w) * 2)
    x, w = torch.ones(1, 2, 4, 4, device=device), torch.ones(2, 2, 3, 3, device=device)
    compiles = []
    for lowerings in ("auto", "auto", "xla_convolution", "xla_convolution", "auto"):
        monkeypatch.setattr(lazytpu.config, "lowerings", lowerings)
        before = lazytpu.metrics.counter("compile") + lazytpu.metrics.counter("disk_hit")
        assert convolve(x, w).sum().item() == 288
        compiles.append(lazytpu.metrics.counter("compile") + lazytpu.metrics.counter("disk_hit") - before)
    assert compiles[1] == compiles[3] == compiles[4] == 0 < compiles[2]


@pytest.mark.parametrize(
    ("function", "direct"),
    [
        (lambda x, y: (x @ y, x.sum()), True),
        (lambda x, y: (x.view(2, 2, 2) @ y[:2]).relu(), True),
        (lambda x, y: (x, x + y[0, 0]), True),  # Dynamo returns the argument
        (lambda x, y: (x.t(), y.exp()), False),  # shares memory with an argument
        (lambda x, y: (z := x * 2, z[0]), True),  # the graph sees to memory that its results share
        (lambda x, y: (x.add_(1), y + 1)[1], False),  # changes an argument
    ],
)
def test_the_wrapper_of_aotautograd_is_left_out_where_it_has_nothing_to_do(device, monkeypatch, function, direct):
    calls = []

    def spy(*args):
        calls.append(direct_call(*args))
        return calls[-1]

    monkeypatch.setattr(entry, "direct_call", spy)
    x, y = torch.randn(2, 4), torch.randn(4, 2)
    wanted = function(x.clone(), y.clone())
    on_device = x.to(device), y.to(device)
    with torch.no_grad():
        got = torch.compile(function, backend="lazytpu")(*on_device)
    assert [call is not None for call in calls] == [direct]
    torch.testing.assert_close(torch.utils._pytree.tree_map(lambda t: t.cpu(), got), wanted)
    if isinstance(got, tuple):
        got[0].zero_()  # is seen wherever the CPU sees it
        wanted[0].zero_()
        torch.testing.assert_close(got[1].cpu(), wanted[1])


def test_a_warm_training_call_starts_executables_alone(device, monkeypatch):
    eager = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    model = copy.deepcopy(eager).to(device)
    compiled = torch.compile(model, backend="lazytpu")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, eager)]
    slow, elsewhere = [], torch.zeros(3).to(device)
    call = CompiledGraph.__call__
    monkeypatch.setattr(CompiledGraph, "__call__", lambda graph, args: (slow.append(graph.kind), call(graph, args))[1])
    for i in range(8):
        if i == 4:
            lazytpu.mark_step()
            slow.clear()
        x = torch.randn(3, 4)
        elsewhere = elsewhere + 1  # stays pending through the calls
        for forward, optimizer, where in ((compiled, optimizers[0], device), (eager, optimizers[1], "cpu")):
            optimizer.zero_grad()
            loss = forward(x.to(where)).pow(2).sum()
            loss.backward()
            optimizer.step()
        if i >= 4:  # the weights are values of this step before
            lazytpu.mark_step()
    assert "forward" not in slow
    for a, b in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a.detach().cpu(), b.detach(), rtol=1e-4, atol=1e-5)
    assert elsewhere.cpu().tolist() == [8.0] * 3
