"""Graphs that are new are interpreted, those that come again are compiled; both compute the same."""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lazytpu
from lazytpu.diagnosis import events
from lazytpu.errors import CompileError
from lazytpu.lowering import registry
from lazytpu.runtime import background, tiers
from lazytpu.tracing import planning

pytestmark = pytest.mark.usefixtures("interpreting")


def counts(*names: str) -> tuple[int, ...]:
    return tuple(lazytpu.metrics.counter(name) for name in names or ("interpret", "compile"))


def test_a_graph_is_compiled_when_it_comes_again(device: torch.device) -> None:
    x = torch.arange(4.0).to(device)
    seen = []
    for _ in range(4):
        assert (x * 2 + 1).sum().item() == 16
        seen.append(counts())
    assert seen == [(1, 0), (1, 1), (1, 1), (1, 1)]
    compiled, _, interpreted = lazytpu.explain().partition("graphs that ran op by op")
    assert compiled.startswith("compiled 1 graph") and "3 ops" in compiled
    assert re.search(r"1 x .*, at test_tiers\.py:\d+", interpreted)


def test_a_graph_of_a_huge_view_is_compiled_at_once(device: torch.device) -> None:
    x = torch.full((1,), 0.5).to(device).expand(1 << 20, 1 << 20)
    assert x.sum().item() == 2.0**39
    assert counts() == (0, 1)


def test_the_number_of_times_is_a_setting(device: torch.device) -> None:
    lazytpu.config.compile_after = 4
    x = torch.arange(4.0).to(device)
    for _ in range(5):
        (x + 1).sum().item()
    assert counts() == (3, 1)


def test_graphs_that_return_after_many_others_are_interpreted_longer(device: torch.device) -> None:
    x = torch.arange(30.0).to(device)

    def total(n: int) -> float:
        return (x[:n] * 2).sum().item()

    for _ in range(8):
        assert [total(n) for n in range(1, 13)] == [n * (n - 1) for n in range(1, 13)]  # lengths of a growing cache
    assert counts() == (96, 0)
    total(12)  # again at once
    assert counts() == (96, 1)


def test_what_is_interpreted_again_is_not_built_again(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    lazytpu.config.compile_after = 4
    x = torch.arange(4.0).to(device)
    monkeypatch.setattr(planning._causes, "limit", 1)
    totals = [lambda: (x * 2).sum().item(), lambda: (x + 1).sum().item()]
    assert [total() for total in totals] == [12, 10]
    monkeypatch.setattr(planning, "graph_of", lambda *args: pytest.fail("built again"))
    assert [totals[0]() for _ in range(2)] == [12, 12]
    assert counts() == (4, 0)
    assert sorted(events.interpretations.values()) == [1, 3]  # each is interpreted again for the cause it had at first


@pytest.fixture
def in_background() -> Iterator[None]:
    lazytpu.config.compile_in_background = True
    yield
    background.settle()
    lazytpu.config.compile_in_background = False


def test_a_thread_compiles_while_the_graph_is_interpreted(
    device: torch.device, in_background: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, go_on = torch.arange(4.0).to(device), threading.Event()
    compile_it = jax.stages.Lowered.compile

    def compile_later(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
        if threading.current_thread() is not threading.main_thread():
            assert go_on.wait(60)
        return compile_it(lowered)

    monkeypatch.setattr(jax.stages.Lowered, "compile", compile_later)

    def total() -> tuple[float, ...]:
        return (x * 5 + 1).sum().item(), *counts()

    assert [total() for _ in range(4)] == [(34, 1, 0), (34, 2, 0), (34, 3, 0), (34, 4, 0)]
    go_on.set()
    background.settle()
    assert [total() for _ in range(2)] == [(34, 4, 1), (34, 4, 1)]
    assert "compiled 1 graph" in lazytpu.explain()


def test_a_graph_that_comes_while_the_thread_ends_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[int] = []

    class Waiting(deque[Any]):
        """Waits that get one more just when the thread has seen that there is none."""

        def __bool__(self) -> bool:
            if len(self) == 0 and threading.current_thread() is not threading.main_thread() and not late.is_set():
                late.set()
                time.sleep(0.1)
                return False
            return len(self) > 0

    class Lowered:
        def compile(self) -> None:
            compiled.append(1)

    late = threading.Event()
    monkeypatch.setattr(background, "_waiting", Waiting())
    monkeypatch.setattr(background, "_futures", {})
    lowered: Any = Lowered()
    background._begin(("one",), lowered, 0.0)
    assert late.wait(60)
    background._begin(("two",), lowered, 0.0)
    for future, _ in background._futures.values():
        future.result(60)
    assert compiled == [1, 1]


def test_programs_of_graphs_that_do_not_come_again_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lowered:
        def compile(self) -> None: ...

    monkeypatch.setattr(background, "_futures", {})
    lowered: Any = Lowered()
    for n in range(100):
        background._begin((n,), lowered, 0.0)
        background.settle()
    assert len(background._futures) == background._MOST_READY + 1
    assert (99,) in background._futures


def test_what_fails_on_the_thread_is_raised_where_the_graph_comes(
    device: torch.device, in_background: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(lowered: jax.stages.Lowered) -> None:
        raise ValueError("not today")

    lazytpu.config.compile_after = 1
    x = torch.arange(4.0).to(device)
    y = x * 6
    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
    lazytpu.mark_step()
    background.settle()
    y = x * 6
    with pytest.raises(CompileError, match="not today"):
        lazytpu.mark_step()
    monkeypatch.undo()
    assert y.sum().item() == 36


@pytest.mark.parametrize("name, value", [("compile_after", 1), ("verify", "first"), ("eager", True)])
def test_some_settings_compile_always(device: torch.device, name: str, value: Any) -> None:
    before = getattr(lazytpu.config, name)
    setattr(lazytpu.config, name, value)
    try:
        assert (torch.arange(4.0).to(device) * 3).sum().item() == 18
        assert counts("interpret") == (0,)
    finally:
        setattr(lazytpu.config, name, before)


def test_deterministic_algorithms_compile_always(device: torch.device) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert (torch.arange(4.0).to(device) * 3).sum().item() == 18
        assert counts("interpret") == (0,)
    finally:
        torch.use_deterministic_algorithms(False)


def test_training_is_that_of_the_cpu(device: torch.device) -> None:
    losses = []
    for where in (torch.device("cpu"), device):
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)
        )
        net.to(where)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        x, y = torch.randn(4, 1, 8, 8).to(where), torch.tensor([0, 1, 2, 0]).to(where)
        for _ in range(5):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            optimizer.step()
            lazytpu.mark_step()
            losses.append(loss.item())
    assert losses[5:] == pytest.approx(losses[:5], rel=1e-4)
    assert counts() == (2, 1)


PROGRAMS: dict[str, Callable[[torch.Tensor], Any]] = {
    "views": lambda x: (x.t(), x[1:], x.view(-1)[::2], x.expand(2, 3, 4), x.unfold(1, 2, 1)),
    "parts reshaped": lambda x: [part.reshape(3, 2, 1) * 2 for part in (x + 1).chunk(2, 1)],
    "a view and its base": lambda x: (x + 1, (x + 1)[0]),
    "writes through views": lambda x: x.clone().t()[1].mul_(2).add_(1),
    "the same value twice": lambda x: (x + 0, (x + 0).view(12)),
    "an input returned": lambda x: (x, x.view(4, 3)),
    "channels last": lambda x: x.view(1, 3, 2, 2).contiguous(memory_format=torch.channels_last) * 2,
    "an index out of range": lambda x: x.gather(1, torch.tensor([[9]], device=x.device)),
    "division by zero": lambda x: x.long() // torch.tensor(0, device=x.device),
    "half precision": lambda x: (x.bfloat16() @ x.bfloat16().t(), x.half().softmax(1)),
    "complex": lambda x: torch.complex(x, x).conj() * 2j,
    "empty": lambda x: (x[:0].sum(0), x[:0] + 1, x.new_empty(0, 3)),
    "zeros without memory": lambda x: torch._efficientzerotensor((3, 4), device=x.device) * x,
    "uninitialized": lambda x: torch.empty_like(x) * 0,
    "scalars": lambda x: (x.sum() * 0.3, x.max().int() + 2, x.any()),
    "bool": lambda x: (x > 1, (x > 1).sum(), x.masked_fill(x > 1, float("-inf"))),
    "sort": lambda x: (x.flip(1).sort(1), x.topk(2), x.argmax(0)),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.view(1, 1, 3, 4)] * 3, is_causal=True),
    "a condition": lambda x: torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,)),
    "no kernel": lambda x: lazytpu.call_jax(lambda a: a * 2, x),
    "in place on another dtype": lambda x: x.int().add_(x.bool()),
    "in place on an expanded tensor": lambda x: x[:1].clone().expand(1, 4).add_(1),
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.filterwarnings("ignore")
def test_interpreted_is_compiled(name: str, device: torch.device) -> None:
    x = torch.arange(12.0).view(3, 4).to(device)

    def run() -> list[torch.Tensor]:
        made = [t for t in torch.utils._pytree.tree_leaves(PROGRAMS[name](x)) if isinstance(t, torch.Tensor)]
        lazytpu.mark_step()
        return made

    first, again = run(), run()
    assert name in ("an input returned", "views") or counts("interpret") > (0,)  # views of an input alone are no graph
    assert counts("compile", "compile_op") != (0, 0) or name in ("an input returned", "views")
    for a, b in zip(first, again, strict=True):
        assert (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride())
        torch.testing.assert_close(a.cpu(), b.cpu(), equal_nan=True)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell])
def test_recurrent_cells_are_interpreted_with_kernels(
    kind: type[nn.LSTMCell | nn.GRUCell], dtype: torch.dtype, bias: bool, device: torch.device
) -> None:
    torch.manual_seed(0)
    cell, x = kind(3, 4, bias=bias).to(dtype), torch.randn(2, 3).to(dtype)
    found = []
    for where in ("cpu", device):
        cell, given = cell.to(where), x.to(where).detach().clone().requires_grad_()
        cell.zero_grad()
        state = cell(given)
        for _ in range(2):
            state = cell(given, state)
        sum(s.float().pow(2).sum() for s in (state if isinstance(state, tuple) else [state])).backward()
        found.append([given.grad, *[p.grad for p in cell.parameters()]])
        found[-1] = [grad.cpu() for grad in found[-1]]
    assert counts("compile", "compile_op") == (0, 0)
    tolerance = 1e-5 if dtype is torch.float32 else 3e-2
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(b, a, rtol=tolerance, atol=tolerance)
    assert min(lazytpu.metrics.timers()["cut"][1], lazytpu.metrics.timers()["interpret"][1]) > 0


def test_results_share_no_memory(device: torch.device) -> None:
    x = torch.zeros(4).to(device)
    y, z = x.view(2, 2).clone(), x + 0
    w = z.view(2, 2).t()
    lazytpu.mark_step()
    for _ in range(3):  # donates, once it is compiled
        z.add_(1)
        lazytpu.mark_step()
    assert (x.tolist(), y.tolist(), z.tolist()) == ([0.0] * 4, [[0.0, 0.0]] * 2, [3.0] * 4)
    assert w.tolist() == [[3.0, 3.0]] * 2


def test_a_tensor_that_came_from_the_cpu_is_not_written_to(device: torch.device) -> None:
    host = torch.zeros(64)
    x = host.to(device)
    x += 1
    lazytpu.mark_step()
    host += 5
    assert x.tolist() == [1.0] * 64
    got = x.cpu()
    x += 1
    lazytpu.mark_step()
    assert got.tolist() == [1.0] * 64


def test_batches_of_many_sizes_compile_nothing(device: torch.device) -> None:
    net = nn.Linear(3, 2).to(device)
    for n in range(1, 20):
        F.mse_loss(net(torch.ones(n, 3).to(device)), torch.zeros(n, 2).to(device)).backward()
        lazytpu.mark_step()
    assert counts("compile") == (0,)


def test_a_very_large_graph_is_compiled_later(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "_LARGE", 4)
    seen = []
    for _ in range(9):
        x = torch.ones(2).to(device)
        for _ in range(8):  # twice as many ops: a return counts a quarter
            x = x.sin()
        x.cpu()
        seen.append(counts())
    assert seen[5:] == [(6, 0), (7, 0), (7, 1), (7, 1)]


def test_whole_functions_are_compiled_at_once(device: torch.device) -> None:
    x = torch.arange(4.0).to(device)
    assert lazytpu.jit(lambda a: a.exp().sum())(x).item() == pytest.approx(x.cpu().exp().sum().item())
    assert counts("compile") == (1,)


def test_rules_see_torch_as_they_do_in_a_compiled_graph(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    rule = registry._RULES[torch.ops.aten.poisson.default]

    def watched(*args: Any, **kwargs: Any) -> Any:
        seen.append(torch._C._is_torch_function_enabled())
        return rule(*args, **kwargs)

    monkeypatch.setitem(registry._RULES, torch.ops.aten.poisson.default, watched)
    torch.ops.aten.poisson.default(torch.ones(17).to(device)).cpu()
    assert counts() == (1, 0) and seen and all(seen)


def test_an_error_of_a_rule_leaves_tensors_as_they_were(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no")

    monkeypatch.setitem(registry._RULES, torch.ops.aten.poisson.default, fails)
    x = torch.ones(3).to(device)
    y = torch.ops.aten.poisson.default(x)
    with pytest.raises(lazytpu.errors.LoweringError, match=r"test_tiers\.py"):
        y.cpu()
    del y
    assert x.tolist() == [1.0] * 3


ROWS_WITH_GAPS: dict[str, Callable[[Any], tuple[torch.Tensor, ...]]] = {
    "query": lambda b: (b[..., ::2], b[..., :8], b[..., 8:]),
    "key and value": lambda b: (b[..., :8], b[..., ::2], b[..., 1::2]),
    "key": lambda b: (b[..., :8], b[..., 8:].mT.contiguous().mT, b[..., 8:]),
    "mask": lambda b: (b[..., :8], b[..., 8:], b[..., :8], b[0, 0, :, :12][:, ::2]),
    "mask of one key": lambda b: (b[..., :8], b[..., 8:], b[..., :8], b[:1, :1, :, :1]),
}


@pytest.mark.parametrize("gaps", ROWS_WITH_GAPS)
def test_attention_of_rows_with_gaps(device: torch.device, gaps: str) -> None:
    def run(where: Any) -> list[torch.Tensor]:
        given = [x.detach() for x in ROWS_WITH_GAPS[gaps](torch.linspace(-2, 2, 768).sin().view(2, 4, 6, 16).to(where))]
        q, k, v, *mask = [x.requires_grad_(n < 3) for n, x in enumerate(given)]
        y = F.scaled_dot_product_attention(q, k, v, *mask)
        return [y, *torch.autograd.grad(y, (q, k, v), torch.linspace(-1, 1, 768).view(2, 4, 6, 16).to(where)[..., ::2])]

    got, want = [x.cpu() for x in run(device)], run("cpu")
    assert counts("interpret")[0] > 0
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w)
