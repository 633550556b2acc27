"""`lazytpu.compile`: a change around the function is noticed, and another program runs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import lazytpu
from tests.support.replay_twins import OPTIMIZERS, Twins, batches, network, replays, same

pytestmark = pytest.mark.usefixtures("replays_from_zero")


def test_a_new_shape_is_another_program_and_both_are_kept() -> None:
    twins = Twins(OPTIMIZERS["sgd"])
    for size in (8, 8, 8, 8, 5, 5, 5, 5):
        twins.run(*batches(1, size)[0])
    compiles = lazytpu.metrics.counter("compile")
    for size in (8, 5, 8, 5):
        twins.run(*batches(1, size)[0])
    assert lazytpu.metrics.counter("compile") == compiles
    twins.check()


def test_dtypes_and_constants_are_told_apart() -> None:
    double = lazytpu.compile(lambda x, k: x * k)
    x = torch.arange(3.0)
    for _ in range(4):
        for t in (x, x.to(torch.int32)):
            for k in (2, 2.0, True):
                same(double(t.to(lazytpu.device()), k), t * k)
    assert replays() > 0


def test_train_and_eval() -> None:
    net = network().to(lazytpu.device())
    ref = network()
    forward = lazytpu.compile(lambda x: net(x))
    x = batches(1)[0][0]
    for mode in (True, True, True, True, False, False, False, False, True, False):
        net.train(mode), ref.train(mode)
        same(forward(x.to(lazytpu.device())), ref(x))
    assert replays() >= 4
    same(dict(net.state_dict()), dict(ref.state_dict()))


def test_a_scheduler_between_the_steps() -> None:
    twins = Twins(OPTIMIZERS["momentum"])
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 4, 0.5) for o in twins.optimizers]
    for x, y in batches(16):
        twins.run(x, y)
        for s in schedulers:
            s.step()
    twins.check()
    assert replays() >= 4
    assert "lr was 0.05 and is 0.025" in lazytpu.explain()


@pytest.mark.parametrize("name", ["momentum", "adamw", "rmsprop"])
def test_a_learning_rate_that_changes_in_every_step_stays_a_number(name: str) -> None:
    twins = Twins(OPTIMIZERS[name])
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 20) for o in twins.optimizers]
    for x, y in batches(16):
        twins.run(x, y)
        for s in schedulers:
            s.step()
    assert type(twins.optimizers[1].param_groups[0]["lr"]) is float
    assert replays() == 13, lazytpu.explain()
    twins.check()


def test_other_hyper_parameters() -> None:
    twins = Twins(OPTIMIZERS["adamw"])
    for i, (x, y) in enumerate(batches(14)):
        if i == 7:
            for o in twins.optimizers:
                o.param_groups[0]["weight_decay"] = 0.3
        twins.run(x, y)
    twins.check()
    assert "weight_decay was 0.01 and is 0.3" in lazytpu.explain()


def test_attributes_of_modules_and_globals() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.settings = 2.0, {"shift": 1.0}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale + self.settings["shift"]

    net = Scaled()
    offset = [0.5]
    forward = lazytpu.compile(lambda x: net(x) + offset[0])
    x = torch.ones(2, device=lazytpu.device())
    for i in range(12):
        if i == 3:
            net.scale = 3.0
        elif i == 7:
            net.settings["shift"] = 5.0
        elif i == 11:
            offset[0] = 7.0
        assert forward(x)[0].item() == net.scale + net.settings["shift"] + offset[0]
    assert replays() >= 4


def test_a_global_that_is_called_as_an_attribute_is() -> None:
    class Held:
        changed = 2.0

    x = torch.ones(2, device=lazytpu.device())
    doubled = lazytpu.compile(lambda x: x * Held.changed)
    for _ in range(6):
        globals()["changed"] = object()  # not read: the function reads an attribute
        assert doubled(x)[0].item() == 2.0
    assert replays() == 4


def test_a_dropout_rate() -> None:
    drop = nn.Dropout(0.5)
    forward = lazytpu.compile(lambda x: drop(x))
    x = torch.ones(4000, device=lazytpu.device())
    for _ in range(4):
        forward(x)
    drop.p = 0.9
    assert 0.05 < (forward(x) != 0).float().mean().item() < 0.15


@pytest.mark.parametrize("how", ["data", "module", "parameter", "copy_", "load_state_dict"])
def test_parameters_that_are_replaced(how: str) -> None:
    twins = Twins(OPTIMIZERS["momentum"])
    for i, (x, y) in enumerate(batches(12)):
        if i == 6:
            torch.manual_seed(5)
            new = nn.Linear(12, 4)
            for net, opt in zip(twins.nets, twins.optimizers, strict=True):
                fresh, device = copy.deepcopy(new).to(net[3].weight.device), net[3].weight.device
                if how == "data":
                    net[3].weight.data = fresh.weight.data
                elif how == "copy_":
                    with torch.no_grad():
                        net[3].weight.copy_(fresh.weight)
                elif how == "load_state_dict":
                    net[3].load_state_dict({k: v.to(device) for k, v in new.state_dict().items()})
                elif how == "module":
                    net[3] = fresh
                    opt.add_param_group({"params": list(fresh.parameters())})
                else:
                    net[3].weight = fresh.weight
                    opt.param_groups[0]["params"].append(fresh.weight)
        twins.run(x, y)
    same(list(twins.nets[1].parameters()), list(twins.nets[0].parameters()))
    assert replays() >= 3


def test_an_optimizer_state_that_is_loaded() -> None:
    twins = Twins(OPTIMIZERS["adamw"])
    for i, (x, y) in enumerate(batches(12)):
        if i == 2:
            kept = [copy.deepcopy(o.state_dict()) for o in twins.optimizers]
        if i == 6:
            for o, state in zip(twins.optimizers, kept, strict=True):
                o.load_state_dict(state)
        twins.run(x, y)
    twins.check()


def test_a_parameter_that_is_frozen() -> None:
    twins = Twins(OPTIMIZERS["sgd"])
    for i, (x, y) in enumerate(batches(10)):
        if i == 5:
            for net in twins.nets:
                net[0].weight.requires_grad_(False)
        twins.run(x, y)
    same([dict(n.state_dict()) for n in twins.nets[1:]], [dict(n.state_dict()) for n in twins.nets[:1]])


def test_a_hook_that_is_added() -> None:
    net = network().to(lazytpu.device()).eval()
    forward = lazytpu.compile(lambda x: net(x))
    x = batches(1)[0][0].to(lazytpu.device())
    for _ in range(4):
        before = forward(x)
    net[3].register_forward_hook(lambda module, inputs, out: out + 100)
    same(forward(x) - 100, before.cpu())


def test_another_way_with_constants_is_another_program() -> None:
    @lazytpu.compile
    def step(x: torch.Tensor, early: bool) -> torch.Tensor | None:
        if early:
            return None
        return x + 1

    x = torch.ones(2, device=lazytpu.device())
    for _ in range(5):
        assert step(x, True) is None
        same(step(x, False), torch.full((2,), 2.0))
