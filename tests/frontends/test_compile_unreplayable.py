"""`lazytpu.compile`: what may not be replayed is recorded in every call, and the report says why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lazytpu
from lazytpu.errors import ReplayError
from tests.support.replay_twins import OPTIMIZERS, Twins, batches, replays, same

pytestmark = pytest.mark.usefixtures("replays_from_zero")


def recorded_in_every_call(function: Any, *args: Any, calls: int = 8) -> str:
    """Calls a compiled function; what `explain` says, once nothing was replayed."""
    for _ in range(calls):
        function(*args)
    assert replays() == 0
    return lazytpu.explain()


def test_a_number_that_changes_is_named_with_its_line() -> None:
    numbers = iter(range(1, 100))
    step = lazytpu.compile(lambda x: x * next(numbers))
    said = recorded_in_every_call(step, torch.ones(2, device=lazytpu.device()))
    assert "a number that Python computes changes from call to call: 4, then 5, in aten.mul.Tensor" in said
    assert "test_compile_unreplayable.py" in said


def test_a_list_that_grows_and_a_counter_that_counts() -> None:
    losses: list[float] = []
    count = 0

    @lazytpu.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        nonlocal count
        losses.append(1.0)
        count += 1
        return x * 2

    said = recorded_in_every_call(step, torch.ones(2, device=lazytpu.device()))
    assert (len(losses), count) == (8, 8)
    assert "besides tensors of the device" in said
    assert "count was 4 and is 5" in said
    assert "the length of losses" in said


def test_a_tensor_that_is_kept() -> None:
    kept: dict[int, torch.Tensor] = {}

    def keep(x: torch.Tensor) -> None:
        kept[len(kept)] = x

    @lazytpu.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        sys_modules_like["keep"](x + 1)
        return x * 2

    sys_modules_like = {"keep": keep}
    recorded_in_every_call(step, torch.ones(2, device=lazytpu.device()))
    assert len(kept) == 8


def test_a_scheduler_in_the_step_and_a_read() -> None:
    net = nn.Linear(2, 2).to(lazytpu.device())
    optimizer = torch.optim.SGD(net.parameters(), 1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    @lazytpu.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        net(x).sum().backward()
        optimizer.step()
        scheduler.step()
        return x

    recorded_in_every_call(step, torch.ones(2, device=lazytpu.device()))
    assert float(optimizer.param_groups[0]["lr"]) == 0.5**8
    reads = lazytpu.compile(lambda x: x * x.sum().item())
    assert "reads a tensor" in recorded_in_every_call(reads, torch.ones(2, device=lazytpu.device()))


def test_a_schedule_that_lives_on_the_device() -> None:
    rate = torch.ones((), device=lazytpu.device())
    weight = torch.zeros(2, device=lazytpu.device())

    @lazytpu.compile
    def step(x: torch.Tensor) -> None:
        weight.add_(x * rate)
        rate.mul_(0.5)

    for _ in range(8):
        step(torch.ones(2, device=lazytpu.device()))
    assert weight[0].item() == sum(0.5**i for i in range(8))
    assert replays() >= 5


@pytest.mark.parametrize("overflow", [False, True])
def test_gradient_scaling(overflow: bool) -> None:
    twins = Twins(OPTIMIZERS["fused"])
    scalers = [torch.amp.GradScaler(d, init_scale=1024.0, growth_interval=3) for d in ("cpu", lazytpu.device().type)]

    def make(net: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any) -> Callable[..., torch.Tensor]:
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss.detach()

        return step

    steps = [make(n, o, s) for n, o, s in zip(twins.nets, twins.optimizers, scalers, strict=True)]
    twins.steps = [steps[0], lazytpu.compile(steps[1])]
    for i, (x, y) in enumerate(batches(12)):
        if overflow and i == 8:
            for net in twins.nets:
                with torch.no_grad():
                    net[3].bias.fill_(float("inf"))
            for step, device in zip(twins.steps, ("cpu", lazytpu.device()), strict=True):
                step(x.to(device), y.to(device))
            break
        twins.run(x, y)
    assert [s.get_scale() for s in scalers[1:]] == [s.get_scale() for s in scalers[:1]]
    assert replays() >= 4, lazytpu.explain()
    if not overflow:
        twins.check()


def test_an_exception_leaves_everything_usable() -> None:
    twins = Twins(OPTIMIZERS["sgd"])
    (x, y), *rest = batches(8)
    for _ in range(4):
        twins.run(x, y)
    for step, device in zip(twins.steps, ("cpu", lazytpu.device()), strict=True):
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            step(x[:, :3].to(device), y.to(device))
    for x, y in rest:
        twins.run(x, y)
    twins.check()
    assert replays() >= 4


def test_verify_finds_what_no_guard_sees() -> None:
    class Hidden:
        factor = 2.0

    @lambda f: lazytpu.compile(f, verify_every=3)
    def step(x: torch.Tensor) -> torch.Tensor:
        return x * Hidden.factor

    x = torch.ones(2, 7, device=lazytpu.device())  # a graph of this test's own, as its first lines are the ones named
    for _ in range(12):
        step(x)
    assert lazytpu.metrics.counter("verified") >= 2
    Hidden.factor = 3.0
    message = "2.0, then 3.0, in aten.mul.Tensor at test_compile_unreplayable.py"
    with pytest.raises(ReplayError, match=message) as caught:
        for _ in range(4):
            step(x)
    assert "is not what was replayed" in str(caught.value)
    same(step(x), torch.full((2, 7), 3.0))


def test_verify_takes_steps_that_count() -> None:
    twins = Twins(OPTIMIZERS["adamw"])
    twins.steps[1] = lazytpu.compile(twins.step(twins.nets[1], twins.optimizers[1]), verify_every=2)
    for x, y in batches(12):
        twins.run(x, y)
    twins.check()
    assert lazytpu.metrics.counter("verified") >= 3


def test_verify_every_is_a_count() -> None:
    with pytest.raises(ValueError, match="verify_every must be 0 or more"):
        lazytpu.compile(lambda x: x, verify_every=-1)


@pytest.mark.parametrize("change", [lambda x: x.unsqueeze_(0), lambda x: x.t_(), lambda x: x.squeeze_(0)])
def test_an_argument_whose_shape_changes(device: torch.device, change: Any) -> None:
    @lazytpu.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        change(x).add_(1)
        return x.sum()

    for _ in range(5):
        x, reference = torch.zeros(1, 3, device=device), torch.zeros(1, 3)
        step(x)
        change(reference).add_(1)
        assert x.shape == reference.shape and x.tolist() == reference.tolist()
    assert "changes the shape, strides or sharding of an argument" in lazytpu.explain()
