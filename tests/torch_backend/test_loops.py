"""Training loops that call no mark_step, as scripts for other devices: each iteration is a graph all the same."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

import lazytpu


def train(
    device: torch.device, steps: int, ended: Callable[[int, torch.Tensor], object]
) -> tuple[nn.Module, nn.Module]:
    """Train a net on the CPU and on the device; ``ended`` is called after each step of the latter."""
    torch.manual_seed(0)
    nets = [nn.Linear(4, 2)]
    nets.append(copy.deepcopy(nets[0]).to(device))
    optimizers = [torch.optim.SGD(net.parameters(), 0.1, momentum=0.9) for net in nets]
    for n in range(steps):
        x = torch.full((3, 4), 0.1 * n)
        for net, optimizer in zip(nets, optimizers, strict=True):
            optimizer.zero_grad()
            loss = net(x.to(net.weight.device)).square().mean()
            loss.backward()
            optimizer.step()
        ended(n, loss.detach())
    return nets[0], nets[1]


def test_a_loop_without_mark_step_is_a_graph_an_iteration(device: torch.device) -> None:
    compiles: list[int] = []

    def ended(step: int, loss: torch.Tensor) -> None:
        if step % 5 == 0:
            loss.item()
        compiles.append(lazytpu.metrics.counter("compile"))

    before = lazytpu.metrics.counter("step")
    host, net = train(device, 16, ended)
    torch.testing.assert_close(net.weight.cpu(), host.weight)
    assert lazytpu.metrics.counter("step") - before == 14  # all but the one that is read, and the one after it
    assert compiles[4] == compiles[-1], lazytpu.explain()  # no graph of five iterations, none of those that are read


@pytest.mark.parametrize("marks", [True, False])
def test_a_loop_that_ends_its_steps_or_keeps_them_whole_is_left_alone(device: torch.device, marks: bool) -> None:
    before = [lazytpu.metrics.counter(name) for name in ("step", "cut")]
    lazytpu.config.cut_loops = marks
    try:
        train(device, 4, lambda step, loss: lazytpu.mark_step() if marks else None)
    finally:
        lazytpu.config.cut_loops = True
    assert [lazytpu.metrics.counter(name) - n for name, n in zip(("step", "cut"), before, strict=True)] == [
        4 * marks
    ] * 2


def test_a_compiled_function_of_two_steps_stays_one_program(device: torch.device) -> None:
    net = nn.Linear(4, 2).to(device)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    x = torch.ones(3, 4, device=device)

    @lazytpu.compile
    def twice() -> None:
        for _ in range(2):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()

    before = lazytpu.metrics.counter("replay")
    for _ in range(6):
        twice()
    assert lazytpu.metrics.counter("replay") - before >= 2, lazytpu.explain()


@pytest.mark.parametrize("log", [float, torch.Tensor.item, str, lambda loss: f"{loss:.3f}", torch.Tensor.tolist])
def test_a_loss_of_the_step_that_ended_is_logged_without_a_cut(
    device: torch.device, log: Callable[[torch.Tensor], object]
) -> None:
    loss = torch.ones(2, 2, device=device).sum()
    lazytpu.mark_step()
    newer = torch.ones(3, device=device) * 2  # recorded meanwhile, for the next step
    before = [lazytpu.metrics.counter(name) for name in ("cut", "execute")]
    assert "4" in str(log(loss))
    assert [lazytpu.metrics.counter(name) for name in ("cut", "execute")] == before
    assert newer.tolist() == [2, 2, 2]


def test_an_optimizer_that_steps_before_its_loop_leaves_the_steps_of_the_loop_whole(device: torch.device) -> None:
    net, x = nn.Linear(4, 2).to(device), torch.ones(3, 4, device=device)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    net(x).sum().backward()
    optimizer.step()  # to make its state
    cuts = []
    for _ in range(3):
        optimizer.zero_grad()
        net(x).sum().backward()
        optimizer.step()
        average = net.weight.detach() * 0.9  # noqa: F841  so that there is something to run after the optimizer
        before = lazytpu.metrics.counter("cut")
        lazytpu.mark_step()
        cuts.append(lazytpu.metrics.counter("cut"))
        assert cuts[-1] == before + 1
    assert cuts[2] - cuts[1] == cuts[1] - cuts[0] == 1


@pytest.mark.parametrize("first", [[], ["host"]])
def test_a_loop_is_noticed_by_any_parameter_on_the_device(device: torch.device, first: list[str]) -> None:
    host, weight = (torch.ones(2).to(place).requires_grad_() for place in ("cpu", device))
    optimizer = torch.optim.SGD([{"params": [host] if first else []}, {"params": [weight]}], 0.1)
    before = lazytpu.metrics.counter("step")
    for _ in range(3):
        optimizer.zero_grad()
        weight.sum().backward()
        optimizer.step()
    assert lazytpu.metrics.counter("step") - before == 2
