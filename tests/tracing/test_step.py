"""Cutting and running: live outputs, donation, one execution for all reads, errors that lose nothing."""

from __future__ import annotations

import gc
import math
import os
import re
import signal
import threading
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lazytpu
from lazytpu.diagnosis import events
from lazytpu.errors import CompileBudgetError, CompileError, LoweringError, UnsupportedOpError
from lazytpu.ir.tree import trace
from lazytpu.lowering import registry
from lazytpu.runtime import compiler, executables
from lazytpu.runtime.host import interrupts, memory
from lazytpu.tracing import record


def counts(*names: str) -> list[int]:
    return [lazytpu.metrics.counter(n) for n in names]


def test_one_execution_for_any_number_of_reads(device: torch.device) -> None:
    x = torch.ones(4, device=device) * 3
    y = x + 1
    before = counts("execute", "cut")
    assert x.tolist() == [3.0] * 4 and y.sum().item() == 16.0 and y[1].item() == 4.0 and f"{x}"
    assert counts("execute", "cut") == [before[0] + 2, before[1] + 2]  # one for x and y, one for the sum


def test_reading_a_loss_each_step_runs_one_graph_a_step(device: torch.device) -> None:
    net = nn.Linear(4, 1).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    x = torch.randn(8, 4, device=device)
    executed = []
    for _ in range(5):
        before = lazytpu.metrics.counter("execute")
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        lazytpu.mark_step()
        loss.item()
        executed.append(lazytpu.metrics.counter("execute") - before)
    assert executed == [1] * 5


def test_dead_values_are_not_outputs(device: torch.device) -> None:
    x = torch.ones(4, device=device)
    lazytpu.mark_step()
    y = (x + 1) * 2
    lazytpu.mark_step()
    graph = events.compilations[-1].graph
    assert len(graph.outputs) == 1 and len(graph.nodes) == 2
    assert y.tolist() == [4.0] * 4


def test_an_input_that_died_is_no_output(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(9).to(device)
    lazytpu.mark_step()

    def broken(out, x):
        raise ValueError("no such thing")

    monkeypatch.setitem(registry._RULES, torch.ops.aten.erfinv.default, broken)
    x.erfinv_()
    with pytest.raises(LoweringError):
        lazytpu.mark_step()
    del x
    lazytpu.mark_step()  # nobody wants the result any more, so nothing is lowered


def test_an_error_that_is_kept_keeps_no_failed_graph(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(out, x):
        raise ValueError("no such thing")

    monkeypatch.setitem(registry._RULES, torch.ops.aten.erfinv.default, broken)
    kept: list[Exception] = []

    def fail() -> None:
        y = torch.ones(9).to(device).erfinv()
        try:
            lazytpu.mark_step()
        except LoweringError as error:
            kept.append(error)
        del y

    fail()
    gc.collect()
    lazytpu.mark_step()  # the tensor is gone, so its graph is not tried again
    assert len(kept) == 1


def test_updated_parameters_and_state_are_donated(device: torch.device) -> None:
    net = nn.Linear(64, 64).to(device)
    optimizer = torch.optim.Adam(net.parameters())
    x = torch.randn(8, 64, device=device)
    for _ in range(3):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
        lazytpu.mark_step()
    graph = events.compilations[-1].graph
    updated = 2 * 3  # weight and bias, each with two moments
    assert len(graph.donated) >= updated
    old = net.weight._s.buffer
    optimizer.step()
    lazytpu.mark_step()
    assert old.is_deleted()


def test_peak_memory_of_an_adam_step_is_that_of_hand_written_jax(device: torch.device) -> None:
    import jax
    import jax.numpy as jnp

    width, batch = 512, 32
    net = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width)).to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    x = torch.randn(batch, width, device=device)
    for _ in range(3):
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        lazytpu.mark_step()
    ours = events.compilations[-1].executable.compiled.memory_analysis()

    def loss(p, x):
        return jnp.square(jnp.tanh(x @ p[0] + p[1]) @ p[2] + p[3]).mean()

    def adam(p, m, v, t, x):
        g = jax.grad(loss)(p, x)
        m = [0.9 * a + 0.1 * b for a, b in zip(m, g, strict=True)]
        v = [0.999 * a + 0.001 * b * b for a, b in zip(v, g, strict=True)]
        steps = [(a / (1 - 0.9**t)) / (jnp.sqrt(b / (1 - 0.999**t)) + 1e-8) for a, b in zip(m, v, strict=True)]
        return [a - 1e-3 * s for a, s in zip(p, steps, strict=True)], m, v, t + 1

    shapes = [(width, width), (width,), (width, width), (width,)]
    p = [jax.ShapeDtypeStruct(s, np.float32) for s in shapes]
    t, example = jax.ShapeDtypeStruct((), np.float32), jax.ShapeDtypeStruct((batch, width), np.float32)
    theirs = jax.jit(adam, donate_argnums=(0, 1, 2, 3)).lower(p, p, p, t, example).compile().memory_analysis()

    def peak(m):
        return m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes - m.alias_size_in_bytes

    assert peak(ours) <= 1.1 * peak(theirs)


def test_a_shared_buffer_is_never_donated(device: torch.device) -> None:
    x = torch.ones(3, device=device)
    lazytpu.mark_step()
    y = torch.empty(3, device=device)
    y.copy_(x)  # y and x hold one buffer from now on
    lazytpu.mark_step()
    x.add_(1)
    lazytpu.mark_step()
    y.add_(10)
    lazytpu.mark_step()
    assert x.tolist() == [2.0] * 3 and y.tolist() == [11.0] * 3


def test_a_host_tensor_overwritten_later_changes_nothing(device: torch.device) -> None:
    for n in (3, 16, 4096):
        host = torch.ones(n)
        x = host.to(device)
        host.zero_()
        assert x.sum().item() == n


def test_what_is_read_is_a_copy(device: torch.device) -> None:
    x = torch.ones(16, device=device)
    host = x.cpu()
    host.zero_()
    assert x.sum().item() == 16.0
    kept = x.cpu()
    x.add_(1)
    lazytpu.wait()
    assert kept.tolist() == [1.0] * 16


def test_asynchronous_errors_and_cuts_from_other_threads(device: torch.device) -> None:
    results: list[float] = []

    def work(k: int) -> None:
        x = torch.full((8,), float(k), device=device)
        for _ in range(20):
            x = x + 1
            if k % 2:
                lazytpu.mark_step()
        results.append(x.sum().item())

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sorted(results) == [8.0 * (k + 20) for k in range(4)]


def test_a_rule_that_fails_names_op_and_line_and_loses_nothing(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.ones(3, device=device)
    lazytpu.mark_step()

    def broken(out, x):
        raise ValueError("no such thing")

    monkeypatch.setitem(registry._RULES, torch.ops.aten.asinh.default, broken)
    y = (x + 1).asinh()
    with pytest.raises(
        LoweringError, match=r"aten\.asinh could not be lowered[\s\S]*at\s+test_step\.py:\d+[\s\S]*f32\[3\]"
    ):
        lazytpu.mark_step()
    monkeypatch.undo()
    torch.testing.assert_close(y.cpu(), torch.full((3,), 2.0).asinh())
    assert x.tolist() == [1.0] * 3


def test_what_a_failed_graph_holds_besides_can_be_read(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(out, x):
        raise ValueError("no such thing")

    x = torch.ones(3, device=device)
    monkeypatch.setitem(registry._RULES, torch.ops.aten.asinh.default, broken)
    bad, good = x.asinh(), x + 1
    later = good * 2
    with pytest.raises(LoweringError):
        lazytpu.mark_step()
    assert good.tolist() == [2.0] * 3
    good += 1
    assert later.tolist() == [4.0] * 3 and (good * torch.ones((), device=device)).tolist() == [3.0] * 3
    for read in (bad.tolist, lambda: (bad + good).sum().item(), lazytpu.mark_step):
        with pytest.raises(LoweringError, match=r"aten\.asinh could not be lowered"):
            read()
    bad = good
    lazytpu.mark_step()
    assert x.tolist() == [1.0] * 3 and bad.tolist() == [3.0] * 3


def test_a_rule_that_gives_a_wrong_type_is_caught(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._RULES, torch.ops.aten.acosh.default, lambda out, x: x.astype("float64"))
    y = torch.ones(3, device=device).acosh()
    with pytest.raises(LoweringError, match=r"the rule gave f64\[3\], torch predicts f32\[3\]"):
        lazytpu.mark_step()
    monkeypatch.undo()
    assert y.tolist() == [0.0] * 3


def test_a_compile_error_leaves_every_tensor_usable(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(3, device=device)
    lazytpu.mark_step()
    x.mul_(7)
    real = compiler.lower

    class Broken:
        def compile(self) -> None:
            raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(compiler, "lower", lambda graph: Broken())
    with pytest.raises(CompileError, match=r"test_step\.py:\d+[\s\S]*aten\.mul"):
        lazytpu.mark_step()
    monkeypatch.setattr(compiler, "lower", real)
    assert x.tolist() == [7.0] * 3


def test_out_of_memory_names_the_op_and_line_and_the_tensors_live(device: torch.device) -> None:
    x = torch.ones(8, device=device)
    lazytpu.mark_step()
    y = x + 1
    huge = torch.ones(1 << 45, device=device) * y[0]
    with pytest.raises(lazytpu.errors.LazyTPUError, match=r"test_step\.py:\d+"):
        lazytpu.mark_step()
    del huge
    assert x.tolist() == [1.0] * 8 and y.tolist() == [2.0] * 8


@pytest.mark.parametrize("compile_after", [1, 2])
def test_what_a_graph_that_needs_too_much_memory_would_overwrite_is_still_there(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, compile_after: int
) -> None:
    monkeypatch.setattr(lazytpu.config, "compile_after", compile_after)
    monkeypatch.setattr(memory, "is_there", lambda size: size < 1 << 40)  # of a program that is never started
    x = torch.ones(8, device=device)
    lazytpu.mark_step()
    x.add_(1)
    huge = torch.ones(1 << 21, 1, device=device) @ torch.ones(1, 1 << 20, device=device) + x[0]
    with pytest.raises(lazytpu.errors.ExecutionError, match=r"(?s)RESOURCE_EXHAUSTED.*test_step\.py:\d+.*f32\["):
        lazytpu.mark_step()
    del huge
    assert x.tolist() == [2.0] * 8 and x.add_(1).tolist() == [3.0] * 8


def test_sizes_at_which_xla_would_end_the_process(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazytpu.config, "compile_after", 1)
    one = torch.ones(1, device=device)
    for make in (lambda: torch.arange(0, 1 << 60, dtype=torch.uint8, device=device), lambda: one.expand(1 << 61).sum()):
        with pytest.raises(lazytpu.errors.CompileError, match=r"(?s)RESOURCE_EXHAUSTED.*test_step\.py:\d+"):
            make().cpu()
    assert (one + 1).tolist() == [2.0]


def test_memory_is_asked_for_as_the_system_gives_it() -> None:
    assert memory.is_there(1 << 20) and not memory.is_there(1 << 60)


def test_unsupported_ops_say_what_to_do(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    from lazytpu.dispatch import cpu_fallback

    kernel = cpu_fallback.fallback(torch.ops.aten.sin.default)
    monkeypatch.setattr(lazytpu.config, "fallback", "error")
    with pytest.raises(UnsupportedOpError) as caught:
        kernel(torch.ones(3, device=device))
    assert re.sub(r":\d+", ":N", str(caught.value)) == (
        "aten::sin has no lowering and no decomposition\n"
        "  at    test_step.py:N\n"
        "  with  f32[3]\n"
        '  fix   add a rule (docs/how-to/add-an-op) or set lazytpu.config.fallback = "cpu"'
    )


def test_a_fallback_is_counted_and_warned_of_once(device: torch.device) -> None:
    from lazytpu.dispatch import cpu_fallback

    kernel = cpu_fallback.fallback(torch.ops.aten.cos.default)
    cpu_fallback._warned.discard("aten.cos")
    x = torch.zeros(3, device=device)
    with pytest.warns(
        cpu_fallback.FallbackWarning, match=r"aten\.cos has no lowering and runs on the CPU, at test_step\.py:\d+"
    ):
        assert kernel(x).tolist() == [1.0] * 3
    kernel(x)
    assert lazytpu.metrics.fallbacks()["aten.cos"] == 2


@pytest.mark.parametrize(
    "call",
    [
        lambda d: torch.ones(3, device=d) + torch.ones(2, device=d),
        lambda d: torch.ones(2, 3, device=d) @ torch.ones(2, 3, device=d),
        lambda d: torch.ones(3, dtype=torch.int32, device=d).add_(1.5),
        lambda d: torch.ones(3, device=d).add_(torch.ones(2, 3, device=d)),
        lambda d: torch.ones(3, device=d).view(2, 2),
        lambda d: torch.cat([torch.ones(2, 3, device=d), torch.ones(2, 2, device=d)]),
        lambda d: F.linear(torch.ones(2, 3, device=d), torch.ones(2, 2, device=d)),
    ],
)
def test_mistakes_raise_torchs_own_message_at_once(call, device: torch.device) -> None:
    with pytest.raises(Exception) as want:
        call("cpu")
    depth = trace.cursor.depth
    with pytest.raises(type(want.value)) as got:
        call(device)
    assert str(got.value) == str(want.value)
    assert "test_step.py" in str(got.traceback[-1].path) or any("test_step.py" in str(t.path) for t in got.traceback)
    assert trace.cursor.depth <= depth + 4  # the operands, not the op that failed


def test_mixing_devices_raises(device: torch.device) -> None:
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.ones(3, device=device) + torch.ones(3)


@pytest.mark.parametrize("numbers", [[signal.SIGINT], [signal.SIGTERM], [signal.SIGALRM, signal.SIGINT]])
def test_a_signal_while_running_is_put_off(device: torch.device, numbers: list[signal.Signals]) -> None:
    x = torch.ones(3, device=device)
    lazytpu.mark_step()
    handlers = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        with pytest.raises(KeyboardInterrupt), interrupts.uninterrupted():
            for number in numbers:
                signal.raise_signal(number)
            time.sleep(0.01)
            x.add_(1)  # still runs: the signal comes at the end of the block
        assert all(signal.getsignal(number) is signal.default_int_handler for number in numbers)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert x.tolist() == [2.0] * 3


def test_interrupts_at_any_time_leave_a_consistent_state(device: torch.device) -> None:
    x, n = torch.zeros(4, device=device), 0
    lazytpu.mark_step()
    for _ in range(2):  # compiled beforehand, so that there is time for many steps
        x = x + 1
        lazytpu.mark_step()
    stop, armed = threading.Event(), [False]

    def interrupt(*_: object) -> None:
        if armed[0]:
            armed[0] = False  # one at a time, so that none comes while the test handles it
            raise KeyboardInterrupt

    def pester() -> None:
        while not stop.wait(0.02):
            os.kill(os.getpid(), signal.SIGINT)

    previous = signal.signal(signal.SIGINT, interrupt)
    thread = threading.Thread(target=pester)
    deadline = time.monotonic() + 3
    thread.start()
    done = 0
    while time.monotonic() < deadline:
        try:
            armed[0] = True
            y = x + 1
            lazytpu.mark_step()
            x = y
            done += 1
            armed[0] = False
        except KeyboardInterrupt:
            n += 1
    stop.set()
    thread.join()
    signal.signal(signal.SIGINT, previous)
    assert n > 0 and done > 0
    values = x.tolist()
    assert len(set(values)) == 1 and values[0] >= done + 2


def test_jax_configuration_is_as_the_user_left_it(device: torch.device) -> None:
    import jax
    import jax.numpy as jnp

    assert not jax.config.jax_enable_x64
    (torch.ones(3, dtype=torch.float64, device=device) * 2).tolist()
    assert not jax.config.jax_enable_x64
    assert jnp.arange(3.0).dtype == jnp.float32 and jnp.array([1]).dtype == jnp.int32
    assert jax.config.jax_default_matmul_precision is None


def test_compile_budget(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    lazytpu.metrics.reset()
    monkeypatch.setattr(lazytpu.config, "max_compiles", 1)
    torch.ones(12, device=device).sinh().tolist()
    x = torch.ones(11, device=device)
    y = x.sinh()
    with pytest.raises(CompileBudgetError, match="max_compiles is 1"):
        lazytpu.mark_step()
    monkeypatch.setattr(lazytpu.config, "max_compiles", 0)
    torch.testing.assert_close(y.cpu(), torch.ones(11).sinh())


def test_executables_are_forgotten_before_memory_mappings_run_out(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    executables.forget_executables()
    gc.collect()
    in_use = memory.mappings()
    monkeypatch.setattr(memory, "most_mappings", lambda: 2 * (in_use + 400))
    before = lazytpu.metrics.counter("executables_forgotten")
    x = torch.ones(40).to(device)
    for n in range(1, 40):  # each program takes some 20 mappings
        part = x[:n]
        assert (part.softmax(0).sum() + part.exp().sort()[0].sum()).item() == pytest.approx(1 + n * math.e, rel=1e-5)
    assert lazytpu.metrics.counter("executables_forgotten") > before
    assert memory.mappings() < in_use + 800
    assert x[:3].softmax(0).sum().item() == pytest.approx(1.0)  # and compiles again what was forgotten


def test_cuts_are_explained_by_line(device: torch.device) -> None:
    events.reset()
    if (torch.ones(2, device=device) * 2).sum() > 1:
        pass
    assert re.search(r"1 x bool \(if\) at test_step\.py:\d+", lazytpu.explain())


def test_dump_writes_every_compiled_graph(device, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazytpu.config, "dump", str(tmp_path))
    (torch.ones(13, device=device).tan() * 3).tolist()
    (folder,) = [path for path in tmp_path.iterdir() if (path / "ir.txt").exists()]
    files = {"ir.txt", "ir.dot", "stablehlo.mlir", "hlo.txt", "hlo-optimized.txt", "cause.txt", "manifest.json"}
    assert files <= {p.name for p in folder.iterdir()}
    assert "aten.tan" in (folder / "ir.txt").read_text()
    assert "HloModule" in (folder / "hlo.txt").read_text()


def test_a_lost_python_object_frees_its_buffer(device: torch.device) -> None:
    gc.collect()
    import jax

    before = len(jax.live_arrays())
    x = torch.ones(5).to(device)
    lazytpu.mark_step()
    del x
    trace.next_step()
    assert len(jax.live_arrays()) <= before + 1
    assert record.lock is not None
