"""Loops in Python are found in the trace and lowered as loops, with the numbers of the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import lazytpu
from lazytpu.debug.links import Names
from lazytpu.ir.graph import Graph
from lazytpu.lowering.loop_bodies import LOOP, Loop
from lazytpu.lowering.loops import ops_to_compile, rolled
from lazytpu.tracing.reading import pending_graph

ITERATIONS = 20
Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazytpu.config, "compile_after", 1)


def loops_of(graph: Graph) -> list[Loop]:
    return [node.args[0] for node in rolled(graph).nodes if node.op is LOOP]


def recurrent(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Carry a state, read a slice in each iteration, keep what each iteration makes."""
    h, found = torch.zeros_like(x[:, 0]), []
    for t in range(ITERATIONS):
        h = torch.tanh(x[:, t] @ w + h @ w.t() + 0.01 * t)
        found.append(h.softmax(-1))
    return torch.stack(found, 1)


def from_behind(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Read the parts of a list from its end, the state of two iterations before, and join the results."""
    parts, states = x.unbind(1), [torch.zeros_like(x[:, 0]), torch.ones_like(x[:, 0])]
    for t in range(ITERATIONS):
        h = torch.tanh(parts[ITERATIONS - 1 - t] + states[-2] @ w)
        states.append(h - h.mean(-1, keepdim=True))
    return torch.cat(states[2:], 0)


def writing(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Write each iteration's result into a buffer that the next one reads."""
    out = torch.zeros_like(x)
    for t in range(ITERATIONS):
        before = out[:, t - 1] * 0.5
        out[:, t] = torch.tanh(x[:, t] @ w + before).cumsum(-1)
    return out


def summing(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Sum up losses, of which only the last sum is needed."""
    loss = torch.zeros((), device=x.device)
    for part in x.split(1, 1):
        loss = loss + (torch.sigmoid(part.squeeze(1) @ w) ** 2).mean() * 0.5
    return loss


FUNCTIONS = [recurrent, from_behind, writing, summing]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
def test_values_and_gradients_are_those_of_the_cpu(function: Function, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(size, generator=generator) * 0.5 for size in ((3, ITERATIONS, 4), (4, 4))]
    there = [x.to(device).requires_grad_() for x in given]
    result = function(*there)
    result.pow(2).sum().backward()
    graph = pending_graph()
    assert len(loops_of(graph)) >= 2  # forward and backward
    assert ops_to_compile(graph) < len(graph.nodes) / 3
    given = [x.requires_grad_() for x in given]
    expected = function(*given)
    expected.pow(2).sum().backward()
    torch.testing.assert_close(result.detach().cpu(), expected.detach(), rtol=1e-5, atol=1e-6)
    for mine, wanted in zip(there, given, strict=True):
        torch.testing.assert_close(mine.grad.cpu(), wanted.grad, rtol=1e-4, atol=1e-5)


def test_random_numbers_are_those_of_the_unrolled_graph(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(4, 8).to(device)

    def dropped() -> torch.Tensor:
        torch.manual_seed(3)
        y = x
        for _ in range(30):
            y = nn.functional.dropout(y, 0.1) + y.mean(0)
            y = y / y.norm()
        return y

    y = dropped()
    assert [loop.iterations for loop in loops_of(pending_graph())] == [30]
    y = y.cpu()
    monkeypatch.setattr(lazytpu.config, "lowerings", "unrolled")
    unrolled = dropped()
    assert not loops_of(pending_graph())
    torch.testing.assert_close(y, unrolled.cpu())


def test_numbers_may_differ_in_any_way_between_iterations(device: torch.device) -> None:
    def stepped(x: torch.Tensor) -> torch.Tensor:
        for i in range(24):
            x = (x * (1.0, -0.5, 0.25)[i % 3] + i * i).cumsum(0) / (1 + i)
            x = x - x.max()
        return x

    x = torch.linspace(-1, 1, 6)
    result = stepped(x.to(device))
    (loop,) = loops_of(pending_graph())
    assert loop.iterations == 24 and {kind for kind, places in loop.numbers.items() if places.size} == {"f", "i"}
    torch.testing.assert_close(result.cpu(), stepped(x))


def test_a_loop_in_a_loop(device: torch.device) -> None:
    def nested(x: torch.Tensor) -> torch.Tensor:
        for _ in range(9):
            y = x
            for _ in range(16):
                y = torch.tanh(y.cumsum(-1) * 0.5)
                y = y - y.amax(-1, keepdim=True) * 0.1
            x = x + y.mean(0)
        return x

    x = torch.linspace(-1, 1, 12).view(3, 4)
    result = nested(x.to(device))
    (outer,) = loops_of(pending_graph())
    (inner,) = loops_of(outer.body)
    assert outer.iterations == 9 and inner.iterations >= 15
    torch.testing.assert_close(result.cpu(), nested(x), rtol=1e-5, atol=1e-6)


def test_layers_with_weights_of_their_own_and_short_chains_stay_as_they_are(device: torch.device) -> None:
    net = nn.Sequential(*[x for _ in range(40) for x in (nn.Linear(32, 32), nn.ReLU(), nn.LayerNorm(32))]).to(device)
    net(torch.ones(2, 32).to(device)).sum().backward()
    assert not loops_of(pending_graph())
    x = torch.ones(4).to(device)
    for _ in range(200):
        x = torch.sin(x) * 0.9
    assert not loops_of(pending_graph())


def test_constants_and_results_that_are_taken_apart_stay_as_they_are(device: torch.device) -> None:
    parts = torch.rand(3, 1100).to(device).requires_grad_().unbind(-1)
    parts[0].sum().backward()  # records zeros for the gradients of the other parts
    assert not loops_of(pending_graph())
    x, w = torch.rand(8, 4).to(device), torch.rand(4, 4).to(device)
    every = []
    for _ in range(60):
        x = torch.tanh(x @ w)
        every.append(x)
    assert not loops_of(pending_graph(tuple(every)))
    assert loops_of(pending_graph((x,)))


def test_the_gradients_of_unused_parts_are_one_operand(device: torch.device) -> None:
    def gradient(on: torch.device | str) -> torch.Tensor | None:
        x = torch.arange(200.0).view(2, 100).to(on).requires_grad_()
        x.unbind(1)[3].square().sum().backward()
        return x.grad

    found, expected = gradient(device), gradient("cpu")
    assert found is not None and expected is not None
    operands = lazytpu.hlo_text(found).partition(" concatenate(")[2].partition(")")[0]
    assert 2 <= len(operands.split(",")) <= 5
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("join", [torch.cat, torch.stack])
def test_what_is_joined_with_itself(join: Callable[..., torch.Tensor], dim: int, device: torch.device) -> None:
    x, y = torch.arange(6.0).view(2, 3), torch.ones(2, 3)
    a, b = x.to(device), y.to(device)
    assert torch.equal(join([b, *[a] * 9, b, b], dim).cpu(), join([y, *[x] * 9, y, y], dim))


def test_what_would_be_copied_for_the_most_part_stays_as_it_is(device: torch.device) -> None:
    x, scale = torch.ones(1 << 17).to(device), torch.ones(1).to(device).requires_grad_()
    y = x
    for _ in range(60):
        y = torch.sin(y * scale) + x
    (y * y).sum().backward()
    assert not loops_of(pending_graph())  # the gradient would need all that the forward pass, which XLA fuses, made

    del y
    now, kept = x, []
    for i in range(200):
        now = torch.softmax(now * 0.5, 0)
        kept += [now] if i in (20, 150) else []
    (loop,) = loops_of(pending_graph((now, *kept)))
    assert loop.iterations < 101  # of one softmax each 100 MB would be kept, for two results


def test_programs_are_as_long_for_any_number_of_iterations(device: torch.device) -> None:
    def decay(x: torch.Tensor, iterations: int) -> str:
        for _ in range(iterations):
            x = torch.softmax(x * 0.9, -1) + x.mean()
        return lazytpu.hlo_text(x)

    lengths = {iterations: decay(torch.ones(4, 8).to(device), iterations).count("\n") for iterations in (40, 400)}
    assert abs(lengths[40] - lengths[400]) < 10


def test_the_ops_in_a_loop_are_found_from_the_names_in_the_program(device: torch.device) -> None:
    x = torch.ones(4, 8).to(device)
    for _ in range(40):
        x = torch.softmax(x * 0.9, -1) + x.mean()
    graph = pending_graph()
    names = Names(graph)
    found = names.ops("jit(f)/lazytpu.loop/while/body/closed_call/aten._softmax/exp")
    assert found and {graph.nodes[i].op.name for i in found} == {"aten._softmax"}
