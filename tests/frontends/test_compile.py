"""`lazytpu.compile`: what is replayed is what eager does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lazytpu
from lazytpu.diagnosis import events
from lazytpu.frontends.replay import capture
from tests.support.replay_twins import OPTIMIZERS, STEPS, Twins, batches, network, replays, same

pytestmark = pytest.mark.usefixtures("replays_from_zero")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_everything_is_as_in_eager_after_every_step(name: str) -> None:
    twins = Twins(OPTIMIZERS[name])
    for i, (x, y) in enumerate(batches()):
        twins.run(x, y)
        if i in (0, 1, 4, 5, STEPS - 1):
            twins.check()
    assert replays() >= 3, lazytpu.explain()


def test_runs_in_a_row_without_a_look_between_them() -> None:
    twins = Twins(OPTIMIZERS["adamw"])
    for x, y in batches(20):
        twins.run(x, y)
    assert replays() >= 15
    assert lazytpu.metrics.counter("compile") <= 3
    twins.check()


def test_equal_step_counters_are_one_input() -> None:
    twins = Twins(OPTIMIZERS["adamw"])
    for x, y in batches(5):
        twins.run(x, y)
    (program,) = [kind.program for kind in twins.steps[1]._kinds.values() if kind.program]
    scalars = [v for v in program.call.executable.graph.inputs if not v.layout.size]
    assert len(scalars) == 2  # the counter of the steps, and batch norm's of the batches
    first, *_, last = twins.optimizers[1].state.values()
    first["step"] += 1  # another number in one of them
    for x, y in batches(6):
        twins.steps[1](x.to(lazytpu.device()), y.to(lazytpu.device()))
    assert (first["step"].item(), last["step"].item()) == (12.0, 11.0)


def test_gradients_that_are_kept_are_not_overwritten() -> None:
    twins = Twins(OPTIMIZERS["sgd"])
    kept: list[list[torch.Tensor]] = [[], []]
    for x, y in batches(8):
        twins.run(x, y)
        for grads, net in zip(kept, twins.nets, strict=True):
            grads.append(net[0].weight.grad)
    same(kept[1], kept[0])
    assert replays() >= 3


@pytest.mark.parametrize("many", [2, 100])
def test_small_gradients_come_as_one_array_where_they_are_many(many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "_MANY", many)
    monkeypatch.setattr(capture, "_SMALL", 12 * 4)  # the two weights are larger
    twins = Twins(OPTIMIZERS["sgd"])
    for i, (x, y) in enumerate(batches(12)):
        twins.run(x, y)
        if i in (2, 3, 8):
            grads = [[p.grad for p in net.parameters()] for net in twins.nets]
            same(grads[1], grads[0])
    twins.check()
    assert replays() >= 6
    assert events.compilations[-1].reference().graph.concatenated == (3 if many == 2 else 0)


def test_gradients_that_are_taken_away_between_the_steps() -> None:
    class Outside(Twins):
        def step(self, net: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., torch.Tensor]:
            def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
                loss = F.cross_entropy(net(x), y)
                loss.backward()
                optimizer.step()
                return loss.detach()

            return step

    twins = Outside(OPTIMIZERS["momentum"])
    for i, (x, y) in enumerate(batches(14)):
        if i not in (8, 11):  # in these steps they add up
            for o in twins.optimizers:
                o.zero_grad()
        twins.run(x, y)
        if i in (6, 9):
            twins.check()
    twins.check()
    assert replays() >= 4


def test_gradients_that_add_up_in_a_step() -> None:
    nets = network(), network().to(lazytpu.device())

    def make(net: nn.Module) -> Callable[..., Any]:
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            return loss.detach()

        return step

    steps = make(nets[0]), lazytpu.compile(make(nets[1]))
    for x, y in batches(8):
        same(steps[1](x.to(lazytpu.device()), y.to(lazytpu.device())), steps[0](x, y))
    same([p.grad for p in nets[1].parameters()], [p.grad for p in nets[0].parameters()])
    assert replays() >= 4
    for net in nets:
        net[0].weight.grad = torch.ones_like(net[0].weight)
    x, y = batches(1)[0]
    same(steps[1](x.to(lazytpu.device()), y.to(lazytpu.device())), steps[0](x, y))
    same(nets[1][0].weight.grad, nets[0][0].weight.grad)


def test_results_arguments_and_views() -> None:
    cache = torch.zeros(4, device=lazytpu.device())

    @lazytpu.compile
    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        x.add_(y)
        cache[1:3] = x[:2]
        return {"x": x, "part": x[1:], "cache": cache, "new": [x * 2, 3], "none": None}

    kept = []
    for i in range(6):
        x, y = torch.full((3,), float(i)).to(lazytpu.device()), torch.ones(3, device=lazytpu.device())
        out = step(x, y)
        kept.append(out["new"][0])
        assert out["x"] is x
        same(x, torch.full((3,), i + 1.0))
        same(out["part"], torch.full((2,), i + 1.0))
        same(out["cache"], torch.tensor([0.0, i + 1.0, i + 1.0, 0.0]))
        assert out["new"][1:] == [3] and out["none"] is None
    same(kept, [torch.full((3,), 2.0 * (i + 1)) for i in range(6)])
    assert replays() >= 3
    y = cache[:3]  # an argument in the memory of something that the function uses
    same(step(torch.ones(3, device=lazytpu.device()), y)["x"], torch.tensor([1.0, 7.0, 7.0]))


def test_arguments_that_alias() -> None:
    step = lazytpu.compile(lambda x, y: x.mul_(2) + y)
    for i in range(10):
        x = torch.ones(2, device=lazytpu.device())
        y = x if i in (5, 7) else torch.ones(2, device=lazytpu.device())
        same(step(x, y), torch.full((2,), 4.0 if i in (5, 7) else 3.0))


def test_dropout_draws_the_numbers_of_the_recorded_step() -> None:
    x = torch.ones(100, device=lazytpu.device())
    drawn = []
    for function in (lambda x: F.dropout(x), lazytpu.compile(lambda x: F.dropout(x))):
        torch.manual_seed(3)
        drawn.append([function(x).cpu() for _ in range(6)])
    same(drawn[1], drawn[0])
    assert replays() >= 3


def test_reading_between_the_steps() -> None:
    twins = Twins(OPTIMIZERS["momentum"])
    for x, y in batches(12):
        twins.run(x, y)
        same(twins.nets[1][0].weight.norm(), twins.nets[0][0].weight.norm())
    assert replays() >= 6
    pending = twins.nets[1][0].weight * 2  # not yet computed when its operand is overwritten
    want = twins.nets[0][0].weight.detach() * 2
    twins.run(*batches(1)[0])
    same(pending, want)


RESULTS = {
    "views of a result": lambda a: [y := a + 1, y, y.view(2, 2), y.view_as(y), y[1:], y.view(torch.int16)],
    "part of a result": lambda a: [(a + 1)[1:].view(torch.int16), (y := a * 2)[2:], y],
    "the argument": lambda a: [a, a, a + 1],
    "views of the argument": lambda a: [a.squeeze(), a.t(), a.view_as(a), a.view(torch.int16), a[1:], a.view(2, 2), -a],
    "lazy bits": lambda a: [(y := torch.complex(a, a)).conj(), y.conj().imag, y.real],
    "a leaf": lambda a: [torch.zeros(3, device=a.device, requires_grad=True), a + 1],
}


@pytest.mark.parametrize("results", RESULTS.values(), ids=RESULTS)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_what_is_returned_is_the_same_in_every_call(results, requires_grad, device) -> None:
    def described(a: torch.Tensor, out: list[torch.Tensor]) -> list[Any]:
        storages = [x.untyped_storage()._cdata for x in (a, *out)]
        return [
            (x.dtype, x.shape, x.stride(), x.storage_offset(), x.is_conj(), x.is_neg(), x.is_leaf and x.requires_grad)
            + ([y is x for y in (a, *out)], storages.index(x.untyped_storage()._cdata), x.tolist())
            for x in out
        ]

    step, plain = lazytpu.compile(results), torch.arange(4.0).requires_grad_(requires_grad)
    a, want = plain.detach().to(device).requires_grad_(requires_grad), described(plain, results(plain))
    for _ in range(5):
        assert described(a, step(a)) == want
    assert lazytpu.metrics.counter("replay")
