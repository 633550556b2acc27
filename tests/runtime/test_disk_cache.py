"""The disk cache: the next process loads instead of compiling, and what decides a program is in its key."""

from __future__ import annotations

import ast
import importlib
import json
import os
import signal
import time
from pathlib import Path

import jax
import pytest
import torch

import lazytpu
from lazytpu.config import config
from lazytpu.diagnosis import events
from lazytpu.lowering import registry
from lazytpu.observe import metrics
from lazytpu.runtime.disk_cache import lookup, provenance, serialized, store
from lazytpu.tracing import reading, step
from tests.support.disk_cache import KEY, again, counted, files, train
from tests.support.processes import Running, start_code

# --- loading instead of compiling --------------------------------------------------------------------------------


def test_what_was_compiled_is_loaded(folder: Path) -> None:
    first = train()
    compiled = metrics.counter("compile")
    assert counted("disk_hit", "disk_miss", "disk_write") == [0, compiled, compiled]
    assert again() == first
    assert counted("compile", "disk_hit", "disk_miss", "disk_rejected") == [0, compiled, 0, 0]
    assert [name for name in metrics.timers() if name in ("lower", "compile")] == []


def test_the_report_says_loaded_and_not_compiled(folder: Path) -> None:
    train()
    assert "earlier process" not in lazytpu.explain() and not any(e.loaded for e in events.compilations)
    again()
    told = lazytpu.explain()
    assert all(e.loaded for e in events.compilations) and " s from disk: the first graph" in told
    assert "in an earlier process" in told
    assert events.one_line(events.compilations[0]).startswith("loaded graph")


def test_a_loaded_executable_donates(folder: Path) -> None:
    train()
    again()
    executable = events.compilations[-1].executable
    assert executable.load_s > 0 and executable.graph.donated
    x = torch.ones(16).to(lazytpu.device())
    lazytpu.mark_step()
    for _ in range(2):
        old = x._s.buffer
        x.mul_(2.0)
        lazytpu.mark_step()
        assert old.is_deleted()
        assert x.tolist() == [x[0].item()] * 16
        again()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8, torch.bool, torch.complex64, torch.int64])
def test_results_have_their_dtypes(folder: Path, dtype: torch.dtype) -> None:
    def run() -> list[torch.Tensor]:
        x = torch.ones(2, 3, dtype=dtype).to(lazytpu.device())
        results = [x.reshape(3, 2), torch.empty(0, 2, dtype=dtype, device=lazytpu.device()), (x == x).any()]
        lazytpu.mark_step()
        lookup.settle()
        return [r.cpu() for r in results]

    first = run()
    step.forget()
    metrics.reset()
    second = run()
    assert metrics.counter("disk_hit") >= 1 and metrics.counter("compile") == 0
    assert all(torch.equal(a, b) and a.dtype is b.dtype for a, b in zip(first, second, strict=True))


def test_memory_and_text_of_a_loaded_executable_can_be_read(folder: Path) -> None:
    train()
    again()
    compiled = events.compilations[-1].executable.compiled
    assert "ENTRY" in compiled.as_text() and compiled.memory_analysis().argument_size_in_bytes > 0


def test_budget_of_compiles_counts_what_is_loaded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train()
    monkeypatch.setattr(config, "max_compiles", 1)
    with pytest.raises(lazytpu.errors.CompileBudgetError):
        again()


# --- two processes -----------------------------------------------------------------------------------------------

PROGRAM = """
import sys, time, torch, lazytpu

start = time.perf_counter()
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).to(lazytpu.device())
y = net(torch.ones(4, 8).to(lazytpu.device())).sum()
lazytpu.mark_step()
print([y.item(), lazytpu.metrics.counter("compile"), lazytpu.metrics.counter("disk_hit")])
"""


def start(place: Path, **environment: str) -> Running:
    return start_code(PROGRAM, loaded=True, LAZYTPU_DISK_CACHE="1", LAZYTPU_DISK_CACHE_DIR=str(place), **environment)


def printed(process: Running) -> tuple[list[float], str]:
    done = process.wait()
    assert done.returncode == 0, done.stderr
    return ast.literal_eval(done.stdout), done.stderr


def test_a_later_process_compiles_nothing_unless_flags_differ(tmp_path: Path) -> None:
    running = [start(tmp_path / "cache") for _ in range(2)]  # together
    first, other = [printed(process)[0] for process in running]
    assert first[0] == other[0] and max(first[1], other[1]) > 0
    assert not [*(tmp_path / "cache").glob(".*.tmp")]
    third, err = printed(start(tmp_path / "cache", LAZYTPU_LOG="info"))
    assert third == [first[0], 0, sum(first[1:])]
    assert "lazytpu: loaded graph 1: " in err and "compiled graph" not in err
    fourth, _ = printed(start(tmp_path / "cache", XLA_FLAGS="--xla_cpu_enable_fast_math=true"))
    assert fourth[1:] == [third[2], 0]


WRITER = """
from lazytpu.runtime.disk_cache import store

for i in range({times}):
    store.store({key!r}, {{"writer": {seed}}}, bytes([{seed}]) * (1000 + 7919 * i % 50_000))
"""


def start_writer(place: Path, seed: int, times: int) -> Running:
    code = WRITER.format(key=KEY, seed=seed, times=times)
    return start_code(code, loaded=True, LAZYTPU_DISK_CACHE="1", LAZYTPU_DISK_CACHE_DIR=str(place))


def test_writers_and_readers_of_one_key(folder: Path) -> None:
    endless, writer = start_writer(folder, 1, 10**9), start_writer(folder, 2, 200)
    seen: set[int] = set()
    deadline = time.monotonic() + 60
    while seen != {1, 2} and time.monotonic() < deadline:
        found = store.read_entry(KEY)
        if found is not None:
            header, payload = found
            assert {*payload} == {header["writer"]}
            seen.add(header["writer"])
    assert writer.wait().returncode == 0
    os.kill(endless.pid, signal.SIGKILL)  # in the middle of a write
    assert endless.wait().returncode == -signal.SIGKILL
    found = store.read_entry(KEY)
    assert found is not None and {*found[1]} == {found[0]["writer"]}
    assert seen == {1, 2} and metrics.counter("disk_rejected") == 0


def test_what_a_killed_writer_left_is_deleted_once_it_is_old(folder: Path) -> None:
    store.store(KEY, {}, b"x")
    left = folder / ".left.123.abc.tmp"
    left.write_bytes(b"half of a program")
    os.utime(left, (0, 0))
    store.store(KEY, {}, b"x")
    assert not left.exists()
    recent = folder / ".left.124.abc.tmp"
    recent.write_bytes(b"somebody writes this now")
    store.store(KEY, {}, b"x")
    assert recent.exists()


# --- what is one program -----------------------------------------------------------------------------------------


def test_the_command(folder: Path) -> None:
    command = pytest.importorskip("typer.testing").CliRunner()
    app = importlib.import_module("lazytpu.cli.cache").app
    store.store(KEY, {}, b"x")
    shown = command.invoke(app, ["info"]).output
    assert str(folder) in shown and "holds    1 program," in shown and "enabled  yes" in shown
    assert json.loads(command.invoke(app, ["info", "--json"]).output)["files"] == 1
    assert command.invoke(app, ["clear"]).output == "deleted 1 program\n"
    assert files(folder) == []


def some_graph() -> object:
    x = torch.ones(3).to(lazytpu.device())
    y = x * 2.0 + 1  # noqa: F841  held, so it is an output
    return reading.pending_graph()


def test_the_key_holds_all_that_decides_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = some_graph()
    device = jax.devices()[0]
    keys = [serialized.key_of(graph, device)]
    assert keys[0] == serialized.key_of(graph, device) and len(keys[0]) == 64

    def differs(target: object, name: str, value: object) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(target, name, value)
            keys.append(serialized.key_of(graph, device))

    differs(config, "matmul_precision", "default")
    differs(config, "check_bounds", True)
    differs(serialized, "sources_digest", lambda: "other rules")
    differs(serialized, "_versions", lambda: ("other",))
    differs(serialized, "_device", lambda device: ("other",))
    with monkeypatch.context() as patch:
        patch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
        keys.append(serialized.key_of(graph, device))
    with jax.numpy_dtype_promotion("strict"):
        keys.append(serialized.key_of(graph, device))
    assert len({*keys}) == len(keys)
    monkeypatch.setattr(config, "log", "info")
    assert serialized.key_of(graph, device) == keys[0]


def test_a_changed_rule_is_another_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "lazytpu"
    (package / "lowering" / "rules").mkdir(parents=True)
    (package / "ir").mkdir()
    (package / "runtime").mkdir()
    (package / "passes").mkdir()
    for name in ("lowering/rules/a.py", "lowering/b.py", "ir/c.py", "runtime/client.py", "passes/d.py", "dtypes.py"):
        (package / name).write_text("x = 1\n")
    monkeypatch.setattr(provenance.resources, "files", lambda name: package)
    digest = provenance.sources_digest.__wrapped__
    before = digest()
    (package / "lowering" / "rules" / "a.py").write_text("x = 2\n")
    after = digest()
    (package / "lowering" / "rules" / "a.py").rename(package / "lowering" / "rules" / "d.py")
    assert len({before, after, digest()}) == 3 and before


def test_without_sources_nothing_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serialized, "sources_digest", lambda: "")
    train()
    assert not folder.exists() and metrics.counter("disk_skipped") == metrics.counter("compile") > 0


def test_a_rule_from_elsewhere_is_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._RULES, torch.ops.aten.gelu.default, lambda out, x, **_: x)
    train()
    assert metrics.counter("disk_skipped") > 0 and metrics.counter("disk_hit") == 0


def test_an_attribute_that_is_an_object_is_not_kept() -> None:
    graph = some_graph()
    assert provenance.is_portable(graph)
    graph.nodes[0].kwargs["what"] = object()
    assert not provenance.is_portable(graph)
    del graph.nodes[0].kwargs["what"]


def test_an_unknown_jax_keeps_nothing(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setitem(serialized._NOTHING, "unordered_effects", [])
    monkeypatch.delitem(serialized._NOTHING, "pgle_profiler")
    expected = train()
    assert metrics.counter("disk_skipped") > 0 and files(folder) == []
    monkeypatch.undo()
    assert len(expected) == 3


def test_switched_off(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "disk_cache", False)
    train()
    assert not folder.exists() and not [name for name in metrics.counters() if name.startswith("disk_")]


def test_tests_do_not_use_the_users_cache() -> None:
    assert config.disk_cache is False
