"""Programs that the last run of a script used are read from disk before they are needed."""

from __future__ import annotations

import ast
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import torch
from jax import lax

import lazytpu
from lazytpu.config import config
from lazytpu.observe import metrics
from lazytpu.runtime import client
from lazytpu.runtime.disk_cache import prefetch, store, warmup
from tests.support.processes import run_script

SCRIPT = """
import os, sys, time, torch, lazytpu
from lazytpu.runtime.disk_cache import prefetch

sizes = [int(a) for a in sys.argv[1:]]
x = torch.ones(4, 4).to(lazytpu.device())
if os.environ.get("FORK"):
    child = os.fork()
    if not child:
        os._exit(0 if (torch.ones(3) @ torch.ones(3)).item() == 3 else 1)
    assert os.waitpid(child, 0)[1] == 0
while any(not f.done() for f in list(prefetch._futures.values())):
    time.sleep(0.01)
results = []
for n in sizes:
    y = (torch.ones(n, n).to(lazytpu.device()) @ x[:, :1].expand(4, n).sum(0).reshape(n, 1)).sum()
    lazytpu.mark_step()
    results.append(y.item())
counted = {n: lazytpu.metrics.counter(n) for n in ("compile", "disk_hit", "disk_prefetch")}
print([results, *counted.values()])
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def run(script: Path, *arguments: object, **environment: str) -> list[object]:
    """[results, programs compiled, loaded, and read before they were needed]."""
    cache = {"LAZYTPU_DISK_CACHE": "1", "LAZYTPU_DISK_CACHE_DIR": str(script.parent / "cache")}
    done = run_script(script, *arguments, **cache, **environment)
    assert done.returncode == 0, done.stderr
    return ast.literal_eval(done.stdout)  # type: ignore[no-any-return]


def lists(script: Path) -> list[Path]:
    return [*(script.parent / "cache").glob("*.list")]


def test_the_second_run_reads_ahead(script: Path) -> None:
    first = run(script, 4, 5)
    assert first == [[64.0, 100.0], 2, 0, 0]
    assert len(lists(script)) == 1 and len(json.loads(lists(script)[0].read_text())) == 2
    assert run(script, 4, 5, FORK="1") == [first[0], 0, 2, 2]  # and a fork in the middle of it does no harm


def test_a_run_with_other_arguments_and_damaged_programs(script: Path) -> None:
    run(script, 4)
    for path in (script.parent / "cache").glob("*.lazytpu"):
        path.write_bytes(path.read_bytes()[:-1])
    assert run(script, 4) == [[64.0], 1, 0, 0]
    assert run(script, 4, 4) == [[64.0, 64.0], 0, 1, 0]
    assert len(lists(script)) == 2


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A disk cache of this test's own, and a process that has read and used nothing."""
    for name, value in (("disk_cache", True), ("disk_cache_dir", str(tmp_path))):
        monkeypatch.setattr(config, name, value)
    for name, empty in (("_futures", {}), ("_noted", []), ("_used", []), ("_started", False)):
        monkeypatch.setattr(prefetch, name, empty)
    monkeypatch.setattr(sys, "argv", [__file__])
    metrics.reset()
    yield tmp_path


WARM = """
import threading, torch, lazytpu
from torch._higher_order_ops.while_loop import while_loop

x = torch.full((300, 300), 0.5).to(lazytpu.device())
for thread in threading.enumerate():
    if thread.name == "lazytpu-prefetch":
        thread.join(60)
        assert not thread.is_alive()
product = (x @ x).sum().item()
endless = while_loop(lambda y: y.sum() < 1e6, lambda y: (y * 2,), (x,))[0].sum().item()  # where x is zero
turns = torch.nn.functional.conv2d(x[None, None], x[None, None, :3, :3]).sum().item()  # a loop of nine
solved = torch.linalg.solve_ex(x[:3, :3] + torch.eye(3).to(x.device), x[:3])[0].sum().item()  # a call of LAPACK
print([[product, endless, turns, solved], *map(lazytpu.metrics.counter, ("compile", "disk_prefetch", "disk_warm_up"))])
"""


def test_programs_that_end_soon_are_run_once_before_they_are_needed(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(WARM)
    results, *counted = run(script)
    assert counted == [4, 0, 0]
    assert run(script) == [results, 0, 4, 3]


def test_long_programs_do_not_end_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    once = jax.jit(lambda x: x @ x).lower(jnp.ones((100, 100))).compile()  # 2e6 operations
    repeated = jax.jit(lambda x: lax.scan(lambda y, _: (y @ x, None), x, None, 100)[0])
    again = repeated.lower(jnp.ones((100, 100))).compile()
    assert warmup.ends_soon(once, once.as_text()) and warmup.ends_soon(again, again.as_text())
    monkeypatch.setattr(warmup, "_MOST_WORK", 1e7)
    assert warmup.ends_soon(once, once.as_text()) and not warmup.ends_soon(again, again.as_text())
    monkeypatch.setattr(warmup, "_MOST_BYTES", 1e4)
    assert not warmup.ends_soon(once, once.as_text())


KEYS = [f"{n:064x}" for n in range(40)]


def test_what_comes_after_a_program_that_was_compiled_is_not_read(fresh: Path) -> None:
    store.note(prefetch._script(), KEYS[:3])
    with prefetch.busy:  # the thread waits for its first turn
        prefetch.start(client.device())
        futures = dict(prefetch._futures)
        prefetch.used(KEYS[9], compiled=True)
    assert [*futures] == KEYS[:3] and all(f.cancelled() for f in futures.values())
    assert prefetch.take(KEYS[0]) is None and store.noted(prefetch._script()) == [KEYS[9]]


def test_a_program_whose_turn_has_not_come_is_read_by_who_needs_it(fresh: Path) -> None:
    store.note(prefetch._script(), KEYS[:1])
    with prefetch.busy:
        prefetch.start(client.device())
        assert prefetch.take(KEYS[0]) is None
    assert metrics.counter("disk_prefetch") == 0


@pytest.mark.parametrize("text", ["", "[", "{}", "3", '["../../etc/passwd"]', "[3, null]", '["A"]'])
def test_a_list_that_makes_no_sense_is_none(fresh: Path, text: str) -> None:
    store.note(KEYS[0], KEYS)
    assert store.noted(KEYS[0]) == KEYS
    (fresh / f"{KEYS[0]}.list").write_text(text)
    assert store.noted(KEYS[0]) == []
    store.note(KEYS[0], KEYS[:1])
    assert store.noted(KEYS[0]) == KEYS[:1]


def test_a_list_that_others_may_write_to_is_none(fresh: Path) -> None:
    store.note(KEYS[0], KEYS)
    (fresh / f"{KEYS[0]}.list").chmod(0o666)
    assert store.noted(KEYS[0]) == []


def test_lists_are_short_and_few(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for key in KEYS:
        prefetch.used(key, compiled=False)
    assert store.noted(prefetch._script()) == KEYS[: prefetch._MOST]
    monkeypatch.setattr(store, "_MOST_LISTS", 3)
    for n in range(6):
        store.note(KEYS[n], [])
        os.utime(fresh / f"{KEYS[n]}.list", (n, n))
    assert len([*fresh.glob("*.list")]) == 3
    assert store.info().files == 0 and store.clear() == 0 and not [*fresh.glob("*.list")]


def test_nothing_is_noted_where_no_script_runs(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for argv in (["-c"], [""], []):
        monkeypatch.setattr(sys, "argv", argv)
        prefetch.used(KEYS[0], compiled=True)
    prefetch.start(client.device())
    assert not [*fresh.glob("*")]


def test_a_cache_that_is_off_reads_nothing(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.note(prefetch._script(), KEYS[:1])
    monkeypatch.setattr(config, "disk_cache", False)
    prefetch.start(client.device())
    assert not prefetch._futures
    assert torch.ones(2).to(lazytpu.device()).sum().item() == 2
