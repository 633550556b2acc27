"""Kill -9 at random moments: during compiles and cache writes, checkpoints, those of a manager, dumps, packages."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import lazytpu
from lazytpu.debug.folder import NotADump, open_dump
from lazytpu.debug.report import write_report
from lazytpu.runtime.disk_cache import lookup, store
from lazytpu.spmd.checkpoint import CheckpointManager
from tests.faults.children import Child, folder, in_child, say
from tests.faults.results import Result, timed

LONGEST_S = 0.5  # from the first ready sign of a child on


@dataclass(frozen=True)
class Victim:
    """What is killed, and what has to hold of what it leaves in its folder.

    Attributes:
        work: goes on until it is killed; says something when it has begun.
        check: what is wrong with the folder, without using the device.
        use: raises if the folder cannot be used as before, in a new process.
    """

    work: Callable[[Path], object]
    check: Callable[[Path], list[str]]
    use: Callable[[Path], object]


def _graphs(first: int = 0, count: int = 1 << 30) -> None:
    for i in range(first, first + count):
        x = torch.arange(float(i % 50 + 2)).to(lazytpu.device())
        y = ((x * 2 + i).sin() + x).cumsum(0)
        expected = torch.arange(float(i % 50 + 2))
        torch.testing.assert_close(y.cpu(), ((expected * 2 + i).sin() + expected).cumsum(0))
        if i == first:
            say("begun")


def _with_cache(place: Path) -> None:
    lazytpu.config.disk_cache, lazytpu.config.disk_cache_dir = True, str(place)
    lazytpu.config.compile_after = 1


def _compile(place: Path) -> None:
    _with_cache(place)
    lookup._HEAD_START_S = 0.0  # writes are a larger part of the time
    _graphs()


def _check_cache(place: Path) -> list[str]:
    lazytpu.config.disk_cache_dir = str(place)
    found = []
    for path in sorted(place.glob("*.lazytpu")):
        try:
            store.read(path.stem)
        except Exception as error:
            found.append(f"{path.name}: {error}")
    return found


def _use_cache(place: Path) -> None:
    _with_cache(place)
    kept = len(list(place.glob("*.lazytpu")))
    _graphs(0, 8)
    lookup.settle()
    counted = lazytpu.metrics.counter
    assert counted("disk_rejected") == counted("disk_error") == 0
    assert counted("disk_hit") == min(kept, 8), (counted("disk_hit"), kept)
    assert counted("disk_write") == 8 - counted("disk_hit")


def _checkpoint(place: Path) -> None:
    x = torch.zeros(1000, 50, device=lazytpu.device())
    momentum = torch.zeros_like(x)
    for step in range(1 << 30):
        x.add_(1)
        momentum.copy_(x * 2)
        torch.save({"x": x, "momentum": momentum, "step": step}, place / "new.pt")
        os.replace(place / "new.pt", place / "last.pt")
        if step == 0:
            say("begun")


def _wrong_checkpoint(path: Path, where: str) -> str:
    state: dict[str, Any] = torch.load(path, weights_only=True, map_location=where)
    step, values = state["step"], {state["x"].unique().item(), state["momentum"].unique().item() / 2}
    return "" if values == {step + 1.0} else f"{path.name} of step {step} holds {values}"


def _check_checkpoint(place: Path) -> list[str]:
    found = [_wrong_checkpoint(place / "last.pt", "cpu")]
    if (place / "new.pt").exists():
        try:
            found.append(_wrong_checkpoint(place / "new.pt", "cpu"))
        except (RuntimeError, EOFError):  # half of a file: torch says so
            pass
    return list(filter(None, found))


def _use_checkpoint(place: Path) -> None:
    assert not _wrong_checkpoint(place / "last.pt", "tpu")


def _manage(place: Path) -> None:
    manager = CheckpointManager(place / "run", keep=2)
    x = torch.zeros(1000, 50, device=lazytpu.device())
    for step in range(1, 1 << 30):
        x.add_(1)
        manager.save(step, {"x": x, "momentum": x * 2, "step": step})  # written by a thread, while x changes
        if step == 2:
            say("begun")  # that of step 1 is written


def _wrong_state(place: Path, state: dict[str, Any]) -> list[str]:
    try:
        step = CheckpointManager(place / "run", keep=2).load(state)
    except Exception as error:
        return [f"the last checkpoint does not load: {error!r}"]
    values = {state["x"].unique().item(), state["momentum"].unique().item() / 2}
    return [] if step and values == {float(step)} and state["step"] == step else [f"step {step} holds {values}"]


def _check_manager(place: Path) -> list[str]:
    return _wrong_state(place, {"x": torch.zeros(1000, 50), "momentum": torch.zeros(1000, 50), "step": 0})


def _use_manager(place: Path) -> None:
    x = torch.zeros(1000, 50, device=lazytpu.device())
    state = {"x": x, "momentum": torch.zeros_like(x), "step": 0}
    wrong = _wrong_state(place, state)
    assert not wrong, wrong
    manager = CheckpointManager(place / "run", keep=2, wait=True)
    last = manager.steps()[-1]
    manager.save(last + 1, state)
    assert manager.steps() == [last, last + 1]


def _dump(place: Path) -> None:
    lazytpu.config.dump = str(place / "dump")
    lazytpu.config.compile_after = 1
    _graphs()


def _check_dump(place: Path) -> list[str]:
    found = []
    try:
        opened = open_dump(place / "dump")
        for graph in opened.graphs:
            found += [f"{graph.name} lacks {file}" for file in graph.manifest["files"] if not graph.text(file)]
        if opened.sources() and not opened.graphs:
            found.append("sources of no graph")
    except NotADump as error:
        found.append(str(error))
    return found


def _use_dump(place: Path) -> None:
    write_report(open_dump(place / "dump"), place / "report.html")


def _package(place: Path) -> None:
    for i in range(1 << 30):
        lazytpu.export.package(lambda x, i=i: x + i, (torch.ones(3),), place / "p.ltz", metadata={"i": i})
        if i == 0:
            say("begun")


def _check_package(place: Path) -> list[str]:
    found = lazytpu.export.describe(place / "p.ltz")
    return [] if [*found["inputs"].values()] == ["f32[3]"] else [str(found)]


def _use_package(place: Path) -> None:
    made = lazytpu.load(place / "p.ltz")
    assert made(torch.ones(3)).tolist() == [1.0 + made.metadata["i"]] * 3


VICTIMS = {
    "compile": Victim(_compile, _check_cache, _use_cache),
    "checkpoint": Victim(_checkpoint, _check_checkpoint, _use_checkpoint),
    "manager": Victim(_manage, _check_manager, _use_manager),
    "dump": Victim(_dump, _check_dump, _use_dump),
    "package": Victim(_package, _check_package, _use_package),
}


def _check(name: str, place: Path, use: bool) -> None:
    victim = VICTIMS[name]
    say(victim.check(place))
    if use:
        victim.use(place)  # which may say more


def _moment(name: str, seed: int, use: bool) -> list[str]:
    """Kill one child at a moment; what is wrong afterwards."""
    victim, place = VICTIMS[name], folder()
    place.chmod(0o700)
    try:
        child = Child(victim.work, place)
        begun = child.hear(60)
        time.sleep(random.Random(seed).uniform(0, LONGEST_S))
        child.kill()
        ended = child.wait()
        if begun is None or ended.status != -9:
            return [f"{name} {seed}: ended before it was killed: {ended.problem}"]
        return _wrong_after(f"{name} {seed}", name, place, use)
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _wrong_after(label: str, name: str, place: Path, use: bool) -> list[str]:
    """Return what a process finds wrong with what a killed one has left, each behind a label."""
    checked = in_child(_check, name, place, use, timeout_s=60)
    texts = [*checked.said[0], checked.problem] if checked.said else [checked.problem]
    return [f"{label}: {text}" for text in filter(None, texts)]


@timed
def kills(count: int, seed: int) -> Result:
    """kill -9 during a compile and its cache write, a checkpoint, one of a manager, a dump, a package"""
    found = []
    for n in range(count):
        found += _moment([*VICTIMS][n % len(VICTIMS)], seed + n, use=n // len(VICTIMS) % 5 == 0)
    return Result(count, f"random moments of {', '.join(VICTIMS)}", found)


_BYTES = 410_000  # the largest file of a checkpoint of `_save_up_to`, and some


def _save_up_to(place: Path, most: int) -> None:
    """Save a second checkpoint, and die where one of its files gets longer than ``most`` bytes."""
    manager = CheckpointManager(place / "run", keep=2, wait=True)
    x = torch.ones(1000, 50, device=lazytpu.device())
    manager.save(1, {"x": x, "momentum": x * 2, "step": 1})
    say("begun")
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))
    manager.save(2, {"x": x * 2, "momentum": x * 4, "step": 2})


def _at_byte(most: int) -> list[str]:
    """Kill one child at a byte; what is wrong afterwards."""
    place = folder()
    place.chmod(0o700)
    try:
        ended = Child(_save_up_to, place, most).wait()
        if ended.status not in (0, -signal.SIGXFSZ) or (not ended.status and most < _BYTES // 4):
            return [f"{most} bytes: {ended.problem or 'it was not killed'}"]
        return _wrong_after(f"{most} bytes", "manager", place, True)
    finally:
        shutil.rmtree(place, ignore_errors=True)


@timed
def bytes_of_a_checkpoint(count: int, seed: int) -> Result:
    """A process killed at a byte of a file of a manager's checkpoint"""
    step = _BYTES // max(1, count - 1)
    found = [text for n in range(count) for text in _at_byte(min(n * step + seed, _BYTES))]
    return Result(count, f"bytes of a file, one in {step:,}", found)
