"""``config.verify`` finds programs that compute something else than the CPU, and no others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lazytpu
from lazytpu.errors import VerificationError
from lazytpu.ir.graph import Graph
from lazytpu.lowering import registry
from lazytpu.runtime import compiler, executables
from lazytpu.runtime.executable import Executable
from tests.support.processes import run_lazytpu


@pytest.fixture(autouse=True)
def verifying(device: torch.device) -> Iterator[None]:
    lazytpu.mark_step()
    executables.forget_executables()
    lazytpu.config.verify = "first"
    yield
    lazytpu.config.verify = ""


@pytest.fixture
def spoiled(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Graph], bool]], None]:
    """Return a function that adds 1 to the first output of the programs it chooses, as a wrong compiler would."""
    compile_graph = compiler.compile_graph

    def spoil(chosen: Callable[[Graph], bool]) -> None:
        def spoiled_compile(graph: Graph, *others: Any) -> Executable:
            made = compile_graph(graph, *others)
            if chosen(graph):
                compiled = made.compiled

                def wrong(*args: Any) -> Any:
                    first, *rest = compiled(*args)
                    return [first + 1, *rest]

                made.compiled = made.call = wrong
            return made

        monkeypatch.setattr(compiler, "compile_graph", spoiled_compile)

    return spoil


def verified() -> int:
    return lazytpu.metrics.counter("verified_program")


def test_training_is_verified_once_a_program(device: torch.device) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3)).to(device)
    optimizer = torch.optim.AdamW(net.parameters())
    x, y = torch.randn(4, 6).to(device), torch.tensor([0, 1, 2, 0]).to(device)
    compiles, before = lazytpu.metrics.counter("compile"), verified()
    for _ in range(4):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
        lazytpu.mark_step()
    assert verified() - before == 2  # the first step makes the optimizer's state
    assert lazytpu.metrics.counter("compile") - compiles == 4  # each with one more for the dropped elements


@pytest.mark.parametrize("wrap", [lazytpu.compile, lazytpu.jit])
def test_compiled_functions_are_verified(device: torch.device, wrap: Any) -> None:
    x = torch.randn(5, 5, device=device)
    before = verified()
    f = wrap(lambda a: (a @ a).softmax(-1))
    results = [f(x) for _ in range(4)]
    torch.testing.assert_close(results[-1].cpu(), (x.cpu() @ x.cpu()).softmax(-1))
    assert verified() > before


def test_a_wrong_op_is_named_and_tensors_stay(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = registry.rule_of(torch.ops.aten.tanh.default)
    monkeypatch.setitem(registry._RULES, torch.ops.aten.tanh.default, lambda out, x: rule(out, x) + 0.5)
    x = torch.zeros(3, device=device)
    lazytpu.mark_step()
    x.add_(1)
    y = x.tanh()  # here
    with pytest.raises(VerificationError, match=r"aten\.tanh differs from the CPU by 0\.5 (.|\n)*test_verify\.py:\d+"):
        y.cpu()
    del y
    monkeypatch.undo()
    assert x.tolist() == [1.0, 1.0, 1.0]


def test_a_wrong_fusion_is_named_by_its_result(device: torch.device, spoiled: Any) -> None:
    spoiled(lambda graph: len(graph.outputs) == 1)
    x = torch.ones(3).to(device)
    y = (x * 2).exp()
    with pytest.raises(VerificationError, match=r"each of its 2 ops is right by itself: the result of aten\.exp"):
        y.cpu()


def test_a_wrong_whole_number_is_found(device: torch.device, spoiled: Any) -> None:
    spoiled(lambda graph: len(graph.nodes) == 1)
    x = torch.arange(6).to(device)
    with pytest.raises(VerificationError, match="instead of 15"):
        x.sum().item()


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x.svd(),
        lambda x: torch.linalg.eigh(x @ x.T),
        lambda x: x.bernoulli(0.5) * 2 + torch.rand_like(x),
        lambda x: (x * 1e20 * 1e20).log(),
        lambda x: x.sort(descending=True),
        lambda x: (x @ x).exp().sum().sin() * 1e6,
        lambda x: ((x - x.mean()) / x.std() > 0.3).nonzero(),
        lambda x: x.new_empty(3, 3).copy_(x[:3, :3]),
        lambda x: torch.ops.aten.special_airy_ai(x),
        lambda x: x.bfloat16() @ x.bfloat16(),
    ],
)
def test_right_programs_pass(device: torch.device, program: Any) -> None:
    torch.manual_seed(0)
    before = verified()
    result = program(torch.randn(8, 8).to(device))
    lazytpu.mark_step()
    assert result is not None
    assert verified() > before


def test_a_result_that_depends_on_the_last_digits_passes(device: torch.device) -> None:
    x = torch.full((1000,), 0.1).to(device)
    (x.cumsum(0) * 10).round().to(torch.int64).sum().item()
    ((x * 3 - 0.3) * 1e9).tanh().cpu()


def test_the_command(tmp_path: Any) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, lazytpu\nprint((torch.ones(3, device='tpu') + 1).sum().item())\n"
        "print(lazytpu.metrics.counter('verified_program'))\n"
    )
    done = run_lazytpu("run", "--verify", script)
    assert done.stdout.splitlines() == ["6.0", "1"], done.stderr
