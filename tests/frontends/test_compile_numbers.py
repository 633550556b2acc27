"""Numbers that schedulers change: steps are replayed with them, and nothing is compiled after the fourth."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers

import lazytpu
from lazytpu.frontends.replay import numbers
from lazytpu.frontends.replay.numbers import Followed, Log, Setting, first_followed, followed, settings_of, tracing
from tests.support.replay_twins import Twins, replays

pytestmark = pytest.mark.usefixtures("replays_from_zero")
STEPS = 14
LR = Setting(0, 0, "lr")

# Each optimizer and each kind of scheduler once; benchmarks/schedules.py goes through all pairs.
PAIRS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], Callable[[Any], Any]]] = {
    "sgd, one cycle": (
        lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, nesterov=True, foreach=True),
        lambda o: schedulers.OneCycleLR(o, 0.02, total_steps=40, cycle_momentum=True),
    ),
    "fused adamw, cyclic": (
        lambda p: torch.optim.AdamW(p, 0.01, fused=True),
        lambda o: schedulers.CyclicLR(o, 0.001, 0.01, step_size_up=3, cycle_momentum=True),
    ),
    "adam, every other step": (lambda p: torch.optim.Adam(p, 0.01), lambda o: schedulers.StepLR(o, 2, 0.9)),
    "rmsprop, warm restarts": (
        lambda p: torch.optim.RMSprop(p, 0.01),
        lambda o: schedulers.CosineAnnealingWarmRestarts(o, 5),
    ),
    "adagrad, one after the other": (
        lambda p: torch.optim.Adagrad(p, 0.01),
        lambda o: schedulers.SequentialLR(
            o, [schedulers.LinearLR(o, 0.1, total_iters=4), schedulers.ExponentialLR(o, 0.95)], [4]
        ),
    ),
}


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(6, 4)


@pytest.mark.parametrize("name", PAIRS)
def test_nothing_is_compiled_after_the_fourth_step(name: str) -> None:
    optimizer, schedule = PAIRS[name]
    twins = Twins(optimizer, linear)
    both = [schedule(o) for o in twins.optimizers]
    torch.manual_seed(1)
    compiled = []
    for _ in range(STEPS):
        before = lazytpu.metrics.counter("compile")
        twins.run(torch.randn(8, 6), torch.randint(0, 4, (8,)))
        compiled.append(lazytpu.metrics.counter("compile") - before)
        for each in both:
            each.step()
    assert not any(compiled[4:]), compiled
    assert replays() >= STEPS - 5, lazytpu.explain()
    twins.check()


def test_a_setting_that_switches_a_term_on_is_recorded() -> None:
    twins = Twins(lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.5), linear)
    torch.manual_seed(1)
    for decay in (0.5, 0.5, 0.4, 0.3, 0.2, 0.0, 0.0, 0.0, 0.1, 0.2, 0.3):
        for o in twins.optimizers:
            o.param_groups[0]["weight_decay"] = decay
        twins.run(torch.randn(8, 6), torch.randint(0, 4, (8,)))
    twins.check()
    assert replays() >= 3
    assert "weight_decay was 0.2 and is 0.0" in lazytpu.explain()


def optimizer_of(lr: float = 0.25, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam([torch.zeros(1)], lr, **settings)


def logged(optimizer: torch.optim.Optimizer, compute: Callable[[Any], list[float]]) -> tuple[Log, list[float]]:
    """What computing numbers from the group of an optimizer notes, and the numbers."""
    with tracing([optimizer]) as log:
        found = compute(optimizer.param_groups[0])
    return log, [float.__pos__(x) for x in found]


def of_two_calls(compute: Callable[[Any], list[float]], first: float = 0.25, second: float = 0.5) -> Followed:
    (old, before), (new, after) = logged(optimizer_of(first), compute), logged(optimizer_of(second), compute)
    return followed(first_followed(old, before), old, new, after)


def computed(found: Followed, lr: float) -> list[float] | None:
    return found.floats(settings_of([optimizer_of(lr)]))


def test_groups_are_as_before_afterwards() -> None:
    optimizer = optimizer_of()
    before = copy.deepcopy(optimizer.param_groups[0])
    with tracing([optimizer]):
        group = optimizer.param_groups[0]
        assert isinstance(group["lr"], numbers.Traced) and isinstance(group["betas"][0], numbers.Traced)
        assert type(copy.deepcopy(group["lr"])) is float
        group["eps"] = group["eps"] * 2
    after = optimizer.param_groups[0]
    assert {k: v for k, v in after.items() if k not in ("eps", "params")} == {
        k: v for k, v in before.items() if k not in ("eps", "params")
    }
    assert type(after["eps"]) is float and after["eps"] == 2 * before["eps"] and type(after["betas"][1]) is float


def test_expressions_are_computed_again() -> None:
    found = of_two_calls(lambda g: [-g["lr"], 1 - g["lr"], 2 ** g["lr"], abs(3 / g["lr"] - g["lr"] ** 2), 7.0])
    assert found.seen == {LR} and not found.unexplained()
    lr = 0.1
    assert computed(found, lr) == [-lr, 1 - lr, 2**lr, abs(3 / lr - lr**2), 7.0]


def test_what_is_computed_elsewhere_is_unexplained() -> None:
    found = of_two_calls(lambda g: [g["lr"], math.sqrt(g["lr"])])
    assert found.unexplained() == [1]


def test_numbers_that_no_longer_agree_are_in_doubt() -> None:
    found = of_two_calls(lambda g: [g["lr"] * 2], 1.0, 1.0)
    assert computed(found, 1.0) == [2.0] and computed(found, 3.0) is None, "2.0 may be a constant"
    assert not found.seen


def test_zeros_of_unlike_sign_are_not_one() -> None:
    found = of_two_calls(lambda g: [g["lr"] * 0.0 * g["lr"], g["lr"] * -0.0])
    zeros = computed(found, 1.0)
    assert zeros is not None and [math.copysign(1.0, x) for x in zeros] == [1.0, -1.0]


def test_a_comparison_that_ends_otherwise_is_in_doubt() -> None:
    found = of_two_calls(lambda g: [g["lr"] if g["lr"] < 1 else 1.0])
    assert computed(found, 0.75) == [0.75] and computed(found, 1.5) is None


@pytest.mark.parametrize("ask", [int, round, str, math.floor, hash, lambda x: x // 2, lambda x: 3 % x, "{:.1f}".format])
def test_what_is_not_noted_is_not_followed(ask: Callable[[Any], object]) -> None:
    def compute(group: Any) -> list[float]:
        ask(group["lr"])
        return [group["lr"]]

    assert of_two_calls(compute).seen == frozenset()


def test_the_contents_of_a_tensor_on_the_cpu_are_watched() -> None:
    scale, count = torch.tensor(2.0), torch.zeros(())
    x = torch.ones(2, device=lazytpu.device())
    by = lazytpu.compile(lambda x: x * scale)
    for i in range(10):
        if i % 4 == 0:
            scale.fill_(i // 4)
        assert by(x)[0].item() == i // 4
    assert replays() >= 2

    @lazytpu.compile
    def counting(x: torch.Tensor) -> torch.Tensor:
        count.add_(1)
        return x + 1

    for _ in range(8):
        counting(x)
    assert count.item() == 8 and "the contents of a tensor on the CPU" in lazytpu.explain()
