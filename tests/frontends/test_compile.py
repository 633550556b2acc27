"""`lazytpu.compile`: what is replayed is what eager does, and what may not be replayed is noticed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lazytpu
from lazytpu.diagnosis import events
from lazytpu.errors import ReplayError
from lazytpu.frontends.replay import capture

STEPS = 8


@pytest.fixture(autouse=True)
def counters(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Counts from zero; and packs the gradients even of small networks, as is done where there are many."""
    lazytpu.metrics.reset()
    monkeypatch.setattr(capture, "_MANY", 2)
    yield


def replays() -> int:
    return lazytpu.metrics.counter("replay")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12, bias=False), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 4))


def batches(n: int = STEPS, size: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(size, 6), torch.randint(0, 4, (size,))) for _ in range(n)]


def same(got: Any, want: Any) -> None:
    """Whether two nests hold the same, wherever their tensors are."""
    if isinstance(want, dict):
        assert list(got) == list(want)
        for key in want:
            same(got[key], want[key])
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want)
        for g, w in zip(got, want, strict=True):
            same(g, w)
    elif isinstance(want, torch.Tensor):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got.detach().cpu(), want.detach(), rtol=1e-4, atol=1e-5)
    else:
        assert got == want


def state_of(net: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    grads = [p.grad for p in net.parameters()]
    state = copy.deepcopy(optimizer.state_dict())
    for group in state["param_groups"]:  # `compile` switches these
        for name in ("capturable", "fused", "foreach"):
            group.pop(name, None)
        group["lr"] = float(group["lr"])
    return [dict(net.state_dict()), grads, state]


class Twins:
    """The same training on the CPU and, compiled, on the device."""

    def __init__(
        self, optimizer: Callable[[Any], torch.optim.Optimizer], make: Callable[[], nn.Module] = network
    ) -> None:
        self.nets = make(), make().to(lazytpu.device())
        self.optimizers = [optimizer(net.parameters()) for net in self.nets]
        self.steps: list[Any] = []
        for net, opt in zip(self.nets, self.optimizers, strict=True):
            self.steps.append(self.step(net, opt))
        self.steps[1] = lazytpu.compile(self.steps[1])

    def step(self, net: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[..., torch.Tensor]:
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    def run(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """One step on both sides; the losses are the same."""
        device = lazytpu.device()
        same(self.steps[1](x.to(device), y.to(device)), self.steps[0](x, y))

    def check(self) -> None:
        """Everything both sides hold is the same."""
        same(state_of(self.nets[1], self.optimizers[1]), state_of(self.nets[0], self.optimizers[0]))


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05),
    "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01),
    "one by one": lambda p: torch.optim.AdamW(p, 0.01, foreach=False),
    "fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5),
    "radam": lambda p: torch.optim.RAdam(p, 0.01),
}


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


# --- what is around the function ---------------------------------------------------------------------------


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


@pytest.mark.parametrize("name", ["sgd", "momentum", "adamw", "rmsprop"])
def test_a_learning_rate_that_changes_in_every_step_becomes_a_tensor(name: str) -> None:
    twins = Twins(OPTIMIZERS[name])
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(o, 20) for o in twins.optimizers]
    for x, y in batches(16):
        twins.run(x, y)
        for s in schedulers:
            s.step()
    assert isinstance(twins.optimizers[1].param_groups[0]["lr"], torch.Tensor)
    assert replays() >= 6, lazytpu.explain()
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


# --- gradients ---------------------------------------------------------------------------------------------


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


# --- what may not be replayed --------------------------------------------------------------------------------


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
    assert "test_compile.py" in said


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


# --- verify ------------------------------------------------------------------------------------------------------


def test_verify_finds_what_no_guard_sees() -> None:
    class Hidden:
        factor = 2.0

    @lambda f: lazytpu.compile(f, verify_every=3)
    def step(x: torch.Tensor) -> torch.Tensor:
        return x * Hidden.factor

    x = torch.ones(2, device=lazytpu.device())
    for _ in range(12):
        step(x)
    assert lazytpu.metrics.counter("verified") >= 2
    Hidden.factor = 3.0
    with pytest.raises(ReplayError, match=r"2.0, then 3.0, in aten.mul.Tensor at test_compile.py") as caught:
        for _ in range(4):
            step(x)
    assert "is not what was replayed" in str(caught.value)
    same(step(x), torch.full((2,), 3.0))


def test_verify_takes_steps_that_count() -> None:
    twins = Twins(OPTIMIZERS["adamw"])
    twins.steps[1] = lazytpu.compile(twins.step(twins.nets[1], twins.optimizers[1]), verify_every=2)
    for x, y in batches(12):
        twins.run(x, y)
    twins.check()
    assert lazytpu.metrics.counter("verified") >= 3


def test_verify_every_is_a_count() -> None:
    with pytest.raises(ValueError, match="verify_every is 0 or more"):
        lazytpu.compile(lambda x: x, verify_every=-1)
