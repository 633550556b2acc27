"""The disk cache: the next process loads instead of compiling, and nothing wrong with a file or folder hurts."""

from __future__ import annotations

import ast
import importlib
import json
import multiprocessing
import os
import random
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import lazytpu
from lazytpu.config import config
from lazytpu.diagnosis import events
from lazytpu.lowering import registry
from lazytpu.observe import metrics
from lazytpu.runtime import compiler
from lazytpu.runtime.disk_cache import lookup, provenance, serialized, store
from lazytpu.tracing import reading, step

ROOT = Path(__file__).parents[2]
KEY = "0" * 64
needs_root = pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="gives a file to another user")
needs_permissions = pytest.mark.skipif(not hasattr(os, "geteuid"), reason="permissions are those of POSIX")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A disk cache of this test's own, switched on."""
    place = tmp_path / "cache"
    for name, value in (("disk_cache", True), ("disk_cache_dir", str(place))):
        monkeypatch.setattr(config, name, value)
    monkeypatch.setattr(store, "_told", set())
    lazytpu.wait()
    step.forget()
    metrics.reset()
    yield place
    step.forget()


def train(steps: int = 3) -> list[float]:
    """A few steps of a small net with dropout and Adam, from the start."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Dropout(0.25), nn.Linear(5, 2)).to(lazytpu.device())
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    x = torch.linspace(-1, 1, 24).reshape(4, 6).to(lazytpu.device())
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        lazytpu.mark_step()
        losses.append(loss.item())
    lookup.settle()
    return losses


def files(place: Path) -> list[Path]:
    return sorted(place.glob("*.lazytpu"))


def counted(*names: str) -> list[int]:
    return [metrics.counter(name) for name in names]


def again() -> list[float]:
    """`train` as a new process would run it: nothing compiled is in memory."""
    step.forget()
    metrics.reset()
    return train()


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


def start(place: Path, **environment: str) -> subprocess.Popen[str]:
    variables = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "LAZYTPU_DISK_CACHE": "1",
        "LAZYTPU_DISK_CACHE_DIR": str(place),
        **environment,
    }
    program = PROGRAM.format(tests=str(ROOT / "tests"))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", program], env=variables, text=True, **pipes)


def printed(process: subprocess.Popen[str]) -> tuple[list[float], str]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return ast.literal_eval(out), err


def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    first, _ = printed(start(tmp_path / "cache"))
    second, err = printed(start(tmp_path / "cache", LAZYTPU_LOG="info"))
    assert first[1] > 0 and first[2] == 0
    assert second == [first[0], 0, first[1]]
    assert "lazytpu: loaded graph 1: " in err and "compiled graph" not in err


def test_other_flags_are_another_program(tmp_path: Path) -> None:
    first, _ = printed(start(tmp_path / "cache"))
    second, _ = printed(start(tmp_path / "cache", XLA_FLAGS="--xla_cpu_enable_fast_math=true"))
    assert second[1:] == [first[1], 0]


def test_processes_that_start_together(tmp_path: Path) -> None:
    running = [start(tmp_path / "cache") for _ in range(2)]
    results = [printed(process)[0] for process in running]
    assert len({r[0] for r in results}) == 1
    assert printed(start(tmp_path / "cache"))[0][1] == 0
    assert not [*(tmp_path / "cache").glob(".*.tmp")]


def _write_often(place: str, seed: int, n: int) -> None:
    config.disk_cache, config.disk_cache_dir = True, place
    for i in range(n):
        store.store(KEY, {"writer": seed}, bytes([seed]) * (1000 + 7919 * i % 50_000))


def test_writers_and_readers_of_one_key(folder: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write_often, args=(str(folder), seed, 200)) for seed in (1, 2)]
    for writer in writers:
        writer.start()
    seen = 0
    while any(writer.is_alive() for writer in writers):
        found = store.load(KEY)
        if found is not None:
            header, payload = found
            assert {*payload} == {header["writer"]}
            seen += 1
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert seen and metrics.counter("disk_rejected") == 0


def _write_for_ever(place: str) -> None:
    _write_often(place, 3, 10**9)


def test_a_writer_that_is_killed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = multiprocessing.get_context("spawn").Process(target=_write_for_ever, args=(str(folder),))
    writer.start()
    while not files(folder):
        time.sleep(0.01)
    writer.kill()
    writer.join()
    found = store.load(KEY)
    assert found is not None and {*found[1]} == {3}
    left = folder / ".left.123.abc.tmp"
    left.write_bytes(b"half of a program")
    os.utime(left, (0, 0))
    store.store(KEY, {}, b"x")
    assert not left.exists()
    recent = folder / ".left.124.abc.tmp"
    recent.write_bytes(b"somebody writes this now")
    store.store(KEY, {}, b"x")
    assert recent.exists()


# --- damaged and foreign files -----------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_anywhere_is_noticed(folder: Path, data: st.DataObject) -> None:
    store.store(KEY, {"a": 1}, random.Random(0).randbytes(300))
    path = folder / f"{KEY}.lazytpu"
    whole = path.read_bytes()
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(whole) - 1))
        changed = whole[at] ^ data.draw(st.integers(1, 255))
        damaged = whole[:at] + bytes([changed]) + whole[at + 1 :]
    else:
        damaged = whole[: data.draw(st.integers(0, len(whole) - 1))]
    path.write_bytes(damaged)
    before = metrics.counter("disk_rejected")
    assert store.load(KEY) is None
    assert metrics.counter("disk_rejected") == before + 1
    path.write_bytes(whole)
    assert store.load(KEY) is not None


def test_damaged_programs_are_compiled_again(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = train()
    for path in files(folder):
        path.write_bytes(path.read_bytes()[:-1])
    assert again() == first
    assert counted("disk_hit") == [0] and metrics.counter("disk_rejected") == metrics.counter("compile") > 0
    assert "is damaged" in caplog.text
    assert again() == first  # and written anew
    assert metrics.counter("compile") == 0


@pytest.mark.parametrize("payload", [b"", b"not a program", b"\x80\x04."])
def test_a_sound_file_that_xla_refuses(folder: Path, payload: bytes) -> None:
    first = train()
    for path in files(folder):
        key = path.name.removesuffix(".lazytpu")
        found = store.load(key)
        assert found is not None
        store.store(key, found[0], payload)
    assert again() == first
    assert metrics.counter("disk_rejected") == metrics.counter("compile") > 0
    assert again() == first and metrics.counter("compile") == 0


@pytest.mark.parametrize("header", [{}, {"kept": [99], "outputs": [], "name": "x"}, {"kept": "no", "outputs": 3}])
def test_a_header_that_does_not_fit(folder: Path, header: dict[str, object]) -> None:
    first = train()
    for path in files(folder):
        key = path.name.removesuffix(".lazytpu")
        found = store.load(key)
        assert found is not None
        store.store(key, header, found[1])
    assert again() == first and metrics.counter("disk_hit") == 0


def test_a_file_under_another_name(folder: Path) -> None:
    store.store(KEY, {}, b"x")
    (folder / f"{KEY}.lazytpu").rename(folder / f"{'1' * 64}.lazytpu")
    assert store.load("1" * 64) is None and metrics.counter("disk_rejected") == 1


def test_what_is_no_file(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    (folder / f"{KEY}.lazytpu").mkdir()
    assert store.load(KEY) is None
    if hasattr(os, "mkfifo"):
        os.mkfifo(folder / f"{'1' * 64}.lazytpu")
        assert store.load("1" * 64) is None  # without waiting for a writer
    (folder / f"{'2' * 64}.lazytpu").symlink_to("/etc/passwd")
    assert store.load("2" * 64) is None
    assert metrics.counter("disk_hit") == 0


# --- who may have written it -------------------------------------------------------------------------------------


@needs_root
def test_files_of_other_users_are_not_trusted(folder: Path) -> None:
    first = train()
    for path in files(folder):
        os.chown(path, 12345, -1)
    assert again() == first
    assert metrics.counter("disk_hit") == 0 and metrics.counter("disk_rejected") > 0


@needs_root
def test_a_folder_of_another_user_is_not_used(folder: Path) -> None:
    first = train()
    os.chown(folder, 12345, -1)
    before = files(folder)
    assert again() == first
    assert counted("disk_hit", "disk_write") == [0, 0] and files(folder) == before
    assert "belongs to another user" in store.info().problem
    with pytest.raises(PermissionError, match="belongs to another user"):
        store.clear()


@needs_permissions
@pytest.mark.parametrize("bit", [stat.S_IWGRP, stat.S_IWOTH])
def test_where_others_may_write(folder: Path, bit: int) -> None:
    first = train()
    os.chmod(folder, 0o700 | bit)
    assert again() == first and counted("disk_hit", "disk_write") == [0, 0]
    os.chmod(folder, 0o700)
    for path in files(folder):
        os.chmod(path, 0o600 | bit)
    assert again() == first and metrics.counter("disk_hit") == 0


@needs_permissions
def test_only_the_user_may_read_what_is_kept(folder: Path) -> None:
    train()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in files(folder)} == {0o600}


# --- a disk that cannot be written -------------------------------------------------------------------------------


def test_no_place_for_a_folder(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.write_text("a file is where the folder should be")
    first = train()
    assert len(first) == 3 and metrics.counter("disk_error") + metrics.counter("disk_rejected") > 0
    assert len({r.getMessage() for r in caplog.records}) == len(caplog.records) <= 2  # not for every graph


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), OSError(30, "Read-only file system")])
@pytest.mark.parametrize("call", ["open", "replace"])
def test_a_full_or_read_only_disk(folder: Path, monkeypatch: pytest.MonkeyPatch, error: OSError, call: str) -> None:
    expected = train()
    real = getattr(os, call)

    def fails(path: object, *args: object, **kwargs: object) -> object:
        if str(path).endswith(".tmp"):
            raise error
        return real(path, *args, **kwargs)

    store.clear()
    monkeypatch.setattr(store.os, call, fails)
    assert again() == expected
    assert metrics.counter("disk_error") == metrics.counter("compile") > 0
    monkeypatch.undo()
    assert not [*folder.glob(".*")] and files(folder) == []


def test_a_folder_that_cannot_be_written_is_still_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = train()

    def refuses(*args: object, **kwargs: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(store.os, "utime", refuses)
    assert again() == first and metrics.counter("compile") == 0


def test_no_home(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(config, "disk_cache_dir", "")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(store.Path, "home", homeless)
    store.store(KEY, {}, b"x")
    assert store.load(KEY) is None and metrics.counter("disk_error") == 2
    assert "home" in store.info().problem


# --- its size ----------------------------------------------------------------------------------------------------


def test_the_least_recently_used_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [str(i) * 64 for i in range(4)]
    for i, key in enumerate(keys):
        store.store(key, {}, random.Random(i).randbytes(10_000))
        os.utime(folder / f"{key}.lazytpu", (1000 + i, 1000 + i))
    assert store.load(keys[0]) is not None  # used, so the second is the oldest now
    monkeypatch.setattr(config, "disk_cache_bytes", 45_000)
    store.store("4" * 64, {}, random.Random(4).randbytes(10_000))
    assert [path.name[0] for path in files(folder)] == ["0", "2", "3", "4"]
    assert counted("disk_evicted") == [1] and store.info().bytes <= 45_000


def test_a_program_larger_than_the_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.store(KEY, {}, b"x")
    monkeypatch.setattr(config, "disk_cache_bytes", 5_000)
    store.store("1" * 64, {}, random.Random(0).randbytes(10_000))
    assert [path.name for path in files(folder)] == [f"{KEY}.lazytpu"] and counted("disk_too_large") == [1]


def test_info_and_clear(folder: Path) -> None:
    assert store.info().files == 0 and store.clear() == 0
    train()
    n = metrics.counter("disk_write")
    (folder / "notes.txt").write_text("the user's own")
    info = store.info()
    assert (info.folder, info.enabled, info.problem, info.files) == (str(folder), True, "", n)
    assert info.bytes == sum(path.stat().st_size for path in files(folder))
    assert store.clear() == n and files(folder) == [] and (folder / "notes.txt").exists()


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {}, "/home/me/.cache/lazytpu"),
        ("linux", {"XDG_CACHE_HOME": "/scratch/me"}, "/scratch/me/lazytpu"),
        ("linux", {"XDG_CACHE_HOME": "relative"}, "/home/me/.cache/lazytpu"),
        ("darwin", {}, "/home/me/Library/Caches/lazytpu"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/lazytpu/Cache"),
    ],
)
def test_the_users_cache_folder(
    monkeypatch: pytest.MonkeyPatch, platform: str, variables: dict[str, str], expected: str
) -> None:
    monkeypatch.setattr(config, "disk_cache_dir", "")
    monkeypatch.setattr(store.sys, "platform", platform)
    monkeypatch.setattr(store.Path, "home", lambda: Path("/home/me"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(store.folder()) == expected


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


# --- numbers that are all one, and waiting -----------------------------------------------------------------------


def test_equal_parameters_share_their_parts_of_the_program(device: torch.device) -> None:
    parameters = [nn.Parameter(torch.full((2, 2), float(i)).to(device)) for i in range(6)]
    optimizer = torch.optim.Adam(parameters, lr=0.1, foreach=True)
    reference = [nn.Parameter(torch.full((2, 2), float(i))) for i in range(6)]
    eager = torch.optim.Adam(reference, lr=0.1, foreach=True)
    step.forget()
    metrics.reset()
    for i in range(6):
        for p, q in zip(parameters, reference, strict=True):
            p.grad, q.grad = torch.ones(2, 2).to(device), torch.ones(2, 2)
        if i == 3:  # one parameter has made fewer steps from now on
            for o, p in ((optimizer, parameters[0]), (eager, reference[0])):
                o.state[p]["step"].fill_(1.0)
        optimizer.step()
        eager.step()
        lazytpu.mark_step()
    for p, q in zip(parameters, reference, strict=True):
        assert torch.allclose(p.cpu(), q)
    graphs = [e.graph for e in events.compilations]
    assert graphs[1].uniform and not graphs[-1].uniform
    assert metrics.counter("compile") == 3 and "now they differ" in events.compilations[-1].cause.text


def test_equal_batch_norms_share_their_counters_part_of_the_program(device: torch.device) -> None:
    net = nn.Sequential(*[nn.BatchNorm1d(3) for _ in range(5)]).to(device)
    step.forget()
    metrics.reset()
    for _ in range(3):
        net(torch.ones(4, 3).to(device))
        lazytpu.mark_step()
    counters = [norm.num_batches_tracked for norm in net]
    assert [c.item() for c in counters] == [3] * 5
    assert metrics.counter("compile") == 1
    ((kind, start, stop),) = events.compilations[-1].graph.uniform
    assert kind == "i" and stop - start == 5


def test_counters_that_part(device: torch.device) -> None:
    counters = [torch.tensor(0).to(device) for _ in range(5)]
    step.forget()
    metrics.reset()
    wanted = [0] * 5
    for added in ([1] * 5, [4] * 5, [1, 2, 3, 4, 5], [5, 4, 3, 2, 1], [1] * 5):
        for i, n in enumerate(added):
            counters[i] += n
            wanted[i] += n
        lazytpu.mark_step()
        assert [c.item() for c in counters] == wanted
    assert metrics.counter("compile") == 2
    assert "the numbers that aten.add.Tensor adds were all the same" in events.compilations[-1].cause.text


def test_zeros_of_unlike_sign_are_two_numbers() -> None:
    from lazytpu.passes.uniform_scalars import are_uniform

    assert are_uniform([0.0, 0.0, 1.0], [], [("f", 0, 2)]) and are_uniform([0.5, 2.0, 2.0], [], [("f", 1, 3)])
    assert not are_uniform([0.0, -0.0], [], [("f", 0, 2)]) and not are_uniform([1.0, 2.0], [], [("f", 0, 2)])
    assert are_uniform([], [7, 1, 1], [("i", 1, 3)]) and not are_uniform([], [7, 1], [("i", 0, 2)])


def test_a_long_compile_is_told_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, device: torch.device
) -> None:
    monkeypatch.setattr(config, "log", "info")
    monkeypatch.setattr(compiler, "_LOGGED_AFTER_S", 0.05)
    real = compiler.lower

    def slow(graph: object) -> object:
        time.sleep(0.4)
        return real(graph)

    monkeypatch.setattr(compiler, "lower", slow)
    x = torch.ones(5).to(device) * 3
    lazytpu.mark_step()
    told = [r.getMessage() for r in caplog.records if "so far" in r.getMessage()]
    assert 2 <= len(told) <= 5 and "compiling a graph of 1 ops, the first at test_cache.py:" in told[0]
    assert x.tolist() == [3.0] * 5
