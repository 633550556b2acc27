"""Scripts that are slow for a reason: the first line that `lazytpu.explain` names is the one to mend.

Each is a loop in which what is wrong costs several times what all else does, so that a loaded machine does not matter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import lazytpu
from lazytpu.debug import op_times
from lazytpu.debug.slow import account, findings, steady
from lazytpu.dispatch import cpu_fallback
from lazytpu.tracing import step as steps
from tests.support.explanations import Explanations

explained = Explanations(__file__)
STEPS = 12
SCRIPTS: dict[str, tuple[str, Callable[..., None]]] = {}


@pytest.fixture(autouse=True)
def fresh(optimized: None) -> Iterator[None]:
    """No graph is known, and settings are as they were afterwards."""
    before = {name: getattr(lazytpu.config, name) for name in ("eager", "compile_after", "max_graph_ops")}
    steps.forget()
    lazytpu.metrics.reset()
    yield
    for name, value in before.items():
        setattr(lazytpu.config, name, value)
    steps.forget()
    lazytpu.metrics.reset()


def slow_for(kind: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function a script; its line with a comment of its name is the one to mend."""

    def add(script: Callable[..., None]) -> Callable[..., None]:
        SCRIPTS[script.__name__] = kind, script
        return script

    return add


def heavy(x: torch.Tensor) -> torch.Tensor:
    """Some milliseconds of the device, in two ops."""
    return x @ x @ x


def host_work(x: torch.Tensor) -> torch.Tensor:
    """Some milliseconds of the host."""
    sum(range(100_000))
    return x + 1


def square(device: torch.device, n: int = 512, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((n, n), 1 / n, dtype=dtype).to(device)


# --- reads that wait --------------------------------------------------------------------------------------


@slow_for("read")
def an_item_in_each_step(device):
    x, losses = square(device), []
    for _ in range(STEPS):
        loss = heavy(x).sum() + host_work(x[0, 0])
        losses.append(loss.item())  # [an_item_in_each_step]
        lazytpu.mark_step()


@slow_for("read")
def a_condition_in_each_step(device):
    x = square(device)
    for _ in range(STEPS):
        y = heavy(x)
        if host_work(y[0, 0]) < 0:  # [a_condition_in_each_step]
            y = y + 1
        lazytpu.mark_step()


@slow_for("read")
def a_float_behind_each_step(device):
    x = square(device)
    for _ in range(STEPS):
        loss = heavy(x).sum() + host_work(x[0, 0])
        lazytpu.mark_step()
        f"{float(loss):.3f}"  # [a_float_behind_each_step]


@slow_for("read")
def a_copy_to_the_cpu(device):
    x = square(device)
    for _ in range(STEPS):
        y = heavy(x) + host_work(x[0, 0])
        lazytpu.mark_step()
        y.cpu()  # [a_copy_to_the_cpu]


@slow_for("read")
def gradients_clipped_with_a_check(device):
    x, p = square(device), torch.nn.Parameter(square(device))
    for _ in range(STEPS):
        p.grad = heavy(x) + host_work(x[0, 0])
        torch.nn.utils.clip_grad_norm_([p], 1.0, error_if_nonfinite=True)  # [gradients_clipped_with_a_check]
        lazytpu.mark_step()


@slow_for("read")
def a_mask_as_an_index(device):
    x = square(device)
    for _ in range(STEPS):
        y = heavy(x) + host_work(x[0, 0])
        chosen = y[0] > 2.0
        y[1][chosen]  # [a_mask_as_an_index]
        lazytpu.mark_step()


@slow_for("read")
def a_read_of_each_part(device):
    parts = [torch.ones(4).to(device) for _ in range(10)]
    for _ in range(STEPS):
        sum(part.sum().item() for part in parts)  # [a_read_of_each_part]
        lazytpu.mark_step()


@slow_for("read")
def answers_that_end_no_step(device):
    x = square(device)
    for _ in range(STEPS):
        y = heavy(x) + host_work(x[0, 0])
        y.cpu()  # [answers_that_end_no_step]


# --- transfers and loaders --------------------------------------------------------------------------------


@slow_for("transfer")
def a_batch_moved_in_the_loop(device):
    batch = torch.ones(4, 1024, 1024)
    for _ in range(STEPS):
        x = batch.to(device)  # [a_batch_moved_in_the_loop]
        x[0, 0, :4].sum()
        lazytpu.mark_step()


@slow_for("transfer")
def many_small_tensors(device):
    for i in range(STEPS):
        rows = [torch.tensor([i, j]).to(device) for j in range(100)]  # [many_small_tensors]
        rows[0] + rows[1]
        lazytpu.mark_step()


@slow_for("loader")
def a_loader_that_is_slow(device):
    def batches():
        for _ in range(STEPS):
            time.sleep(0.01)
            yield torch.ones(4)

    for x in lazytpu.DeviceLoader(batches()):  # [a_loader_that_is_slow]
        x + 1


# --- graphs that are new in each step ---------------------------------------------------------------------


@slow_for("compile")
def batches_of_many_sizes(device):
    results = []
    for n in range(4, 13):
        x = torch.ones(n, 3).to(device)
        results.append(x.tanh())  # [batches_of_many_sizes]
        lazytpu.mark_step()


@slow_for("interpret")
def texts_of_many_lengths(device):
    lazytpu.config.compile_after = 2
    weight = torch.ones(3, 3).to(device)
    for n in range(4, 30):
        x = torch.ones(n, 3).to(device)
        x = x @ weight  # [texts_of_many_lengths]
        for _ in range(20):
            x = x.tanh()
        lazytpu.mark_step()


@slow_for("interpret")
def a_cache_that_grows(device):
    lazytpu.config.compile_after = 2
    cache, new = torch.ones(1, 8).to(device), torch.ones(1, 8).to(device)
    for _ in range(20):
        cache = torch.cat([cache, new])  # [a_cache_that_grows]
        x = cache
        for _ in range(20):
            x = x.tanh()
        lazytpu.mark_step()


# --- a busy host ------------------------------------------------------------------------------------------


@slow_for("host")
def hundreds_of_tiny_ops(device):
    steps.forget()  # a graph that is compiled has lines to name
    x = torch.ones(3).to(device)
    for _ in range(STEPS):
        for _ in range(300):
            x = x * 0.5  # [hundreds_of_tiny_ops]
        lazytpu.mark_step()


@slow_for("host")
def an_optimizer_that_loops(device):
    parameters = [torch.nn.Parameter(torch.ones(2, device=device)) for _ in range(5)]
    optimizer = torch.optim.Adam(parameters, foreach=False)
    for _ in range(STEPS):
        for p in parameters:
            p.grad = torch.ones_like(p)
        optimizer.step()  # [an_optimizer_that_loops]
        lazytpu.mark_step()


@slow_for("unreplayed")
def a_compiled_step_with_its_own_count(device):
    x, count = torch.ones(3).to(device), iter(range(1, 100))

    @lazytpu.compile
    def train_step(x):
        return host_work(x) * next(count)  # [a_compiled_step_with_its_own_count]

    for _ in range(2 * STEPS):
        train_step(x)
        lazytpu.mark_step()


@slow_for("unreplayed")
def a_compiled_step_that_keeps_a_list(device):
    x, seen = torch.ones(3).to(device), []

    @lazytpu.compile  # [a_compiled_step_that_keeps_a_list]
    def train_step(x):
        seen.append(1)
        return host_work(x)

    for _ in range(2 * STEPS):
        train_step(x)
        lazytpu.mark_step()


@pytest.mark.filterwarnings("ignore:.*runs on the CPU")
@slow_for("fallback")
def an_op_without_a_lowering(device):
    op = cpu_fallback.fallback(torch.ops.aten.sort.default)
    x = torch.rand(100_000).to(device)
    for _ in range(STEPS):
        op(x)  # [an_op_without_a_lowering]
        lazytpu.mark_step()


@slow_for("setting")
def each_op_by_itself(device):
    lazytpu.config.eager = True
    x = torch.ones(3).to(device)
    for _ in range(STEPS):
        (x + 1) * 2
        lazytpu.mark_step()


@slow_for("no step")
def a_loop_that_ends_no_step(device):
    lazytpu.config.max_graph_ops = 30
    x = torch.ones(3).to(device)
    for _ in range(30 * STEPS):
        x = x * 0.5  # [a_loop_that_ends_no_step]


# --- a busy device ----------------------------------------------------------------------------------------


@slow_for("dtype")
def products_of_doubles(device):
    x = square(device, 384, torch.float64)  # as numpy makes them
    for _ in range(STEPS):
        x = x @ x  # [products_of_doubles]
        lazytpu.mark_step()


@slow_for("layout")
def a_transposed_copy(device):
    x, y = torch.ones(512, 16, 256).to(device), None
    for _ in range(STEPS):
        y = x.permute(2, 0, 1).contiguous()  # [a_transposed_copy]
        lazytpu.mark_step()
        lazytpu.wait()
    assert y is not None


@slow_for("")
def one_costly_product(device):
    x, y = square(device, 640), square(device, 64)
    for _ in range(STEPS):
        y = y @ y
        x = x @ x  # [one_costly_product]
        lazytpu.mark_step()


def first_line() -> tuple[str, str]:
    """Kind and line that are named first: of what could be saved, else the costliest."""
    step = steady.step_time()
    assert step is not None
    found = findings.findings(step)
    if found:
        return found[0].kind, explained.marked(found[0].line)
    return "", explained.marked(account.table()["lines"][0]["rows"][0][0])


@pytest.mark.filterwarnings("ignore:.*runs on the CPU")
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_first_line_is_the_one_to_mend(name: str, device: torch.device) -> None:
    kind, script = SCRIPTS[name]
    expected = kind, "lazytpu.config.eager" if kind == "setting" else f"[{name}]"
    for _ in range(5):  # other programs may have taken the CPUs
        lazytpu.metrics.reset()
        script(device)
        found, text = first_line(), lazytpu.explain()
        if found == expected:
            break
    assert found == expected, text
    assert "where the time of a " in text and "fix  " in text or not kind


def test_nothing_is_said_of_a_few_steps(device: torch.device) -> None:
    x = torch.ones(3).to(device)
    for _ in range(steady.FEWEST - 1):
        x = x * 0.5
        lazytpu.mark_step()
    assert steady.step_time() is None and account.table() == {} and account.text() == []


def test_the_parts_of_a_step_are_all_of_it(device: torch.device) -> None:
    a_float_behind_each_step(device)
    step = steady.step_time()
    assert step is not None and step.steady and step.noted == STEPS
    assert sum(step.parts.values()) == pytest.approx(step.total_s) and 0 < step.host_s < step.total_s
    assert step.parts["waiting_s"] > 0.1 * step.total_s


def test_the_device_is_measured_where_metrics_are_on(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazytpu.config, "metrics", True)
    one_costly_product(device)
    step = steady.step_time()
    assert step is not None and step.measured and step.bound == "device" and step.device_s > step.host_s
    assert "the device works at least" not in lazytpu.explain()


def test_lines_are_measured_where_a_profile_was_taken(device: torch.device, tmp_path: Path) -> None:
    x, y = square(device), torch.ones(3).to(device)
    with lazytpu.profiler.trace(tmp_path):
        for _ in range(STEPS):
            y = y + 1
            x = x @ x  # [product]
            lazytpu.mark_step()
    text = explained.marked(lazytpu.explain())
    lines = text.partition("the costliest lines, measured by the profile\n")[2].splitlines()
    assert lines[0].endswith("%  [product]: aten.mm"), text
    lazytpu.metrics.reset()
    assert not op_times.measured


def test_a_replayed_step_that_waits_for_nothing_is_the_hosts(device: torch.device) -> None:
    x = torch.ones(3).to(device)

    @lazytpu.compile
    def train_step(x):
        return x * 0.5

    for _ in range(4 * STEPS):
        sum(range(100_000))
        train_step(x)
    found = first_line()
    assert found == ("python", ""), lazytpu.explain()


def test_what_is_saved_is_at_most_a_step(device: torch.device) -> None:
    a_read_of_each_part(device)
    step = steady.step_time()
    assert step is not None
    found = findings.findings(step)
    assert found and all(findings.LEAST <= step.share(f.costs_s) <= 1 for f in found)
    assert {f.kind for f in found} <= {*findings.KINDS, "python", "unreplayed"}
