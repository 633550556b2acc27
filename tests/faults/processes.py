"""Several processes and threads at once, and leaving a process at any moment."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from torch import nn

import lazytpu
from lazytpu.runtime.disk_cache import lookup, store
from tests.faults.children import Child, folder, in_child, say
from tests.faults.results import Result, timed

AT_ONCE = 8
GRAPHS = 6


def _share(cache: Path, seed: int) -> None:
    lazytpu.config.disk_cache, lazytpu.config.disk_cache_dir, lazytpu.config.compile_after = True, str(cache), 1
    lookup._HEAD_START_S = 0.0
    for n in random.Random(seed).sample(range(2, 2 + GRAPHS), GRAPHS):
        x = torch.arange(float(n)).to(lazytpu.device())
        assert ((x + 1) * 2 - x).tolist() == [i + 2.0 for i in range(n)]
    lookup.settle()
    count = lazytpu.metrics.counter
    say([count("disk_hit") + count("disk_write"), count("disk_rejected") + count("disk_error")])


@timed
def shared_cache(count: int, seed: int) -> Result:
    """Eight processes with one cold cache"""
    found = []
    for n in range(count):
        place = folder()
        children = [Child(_share, place / "cache", 100 * (seed + n) + k) for k in range(AT_ONCE)]
        for child in children:
            ended = child.wait()
            if ended.problem or ended.said != [[GRAPHS, 0]]:
                found.append(f"{n}: {ended.said} {ended.problem}")
        lazytpu.config.disk_cache_dir = str(place / "cache")
        files = [path for path in sorted((place / "cache").iterdir()) if path.suffix != ".list"]
        for path in files:
            if path.suffix == ".lazytpu":
                store.read(path.stem)
        names = {path.suffix for path in files}
        if names != {".lazytpu", ".TAG"} or len(files) != GRAPHS + 1:
            found.append(f"{n}: {[path.name for path in files]}")
        shutil.rmtree(place)
    return Result(count, "times eight processes", found)


# --- threads ------------------------------------------------------------------------------------------------------


def _threads(rounds: int, seed: int) -> None:
    sys.setswitchinterval(1e-5)
    device, wrong = lazytpu.device(), []
    shared = torch.zeros(4, 4, device=device)
    net = nn.Linear(4, 4).to(device)

    def work(k: int) -> None:
        chance = random.Random(seed * AT_ONCE + k)
        try:
            own, expected = torch.zeros(4, 4, device=device), torch.zeros(4, 4)
            for _ in range(rounds):
                match chance.randrange(7):
                    case 0:
                        lazytpu.mark_step()
                    case 1 if not torch.equal(own.cpu(), expected):
                        wrong.append(f"thread {k}: {own.cpu()} instead of {expected}")
                    case 2:
                        w = torch.ones(4, requires_grad=True, device=device)
                        (net(w) * w).sum().backward()
                        if w.grad is None or not w.grad.isfinite().all():
                            wrong.append("gradient")
                    case 3:
                        shared[k % 4].add_(0)
                    case _:
                        for t in (own, expected):
                            t.add_(k)
                            t.t()[1].mul_(-1)
                            torch._foreach_add_([t, t[:1]], 1)
                            t.clamp_(-1000, 1000)
        except Exception as error:
            wrong.append(f"thread {k}: {type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, args=(k,)) for k in range(AT_ONCE)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert shared.sum().item() == 0
    assert not wrong, wrong[:3]


@timed
def threads(count: int, seed: int) -> Result:
    """Eight threads that record, read, cut and differentiate"""
    rounds = 100
    ended = [in_child(_threads, rounds, seed + n, timeout_s=240) for n in range(max(1, count // AT_ONCE // rounds))]
    found = [e.problem for e in ended if e.problem]
    return Result(len(ended) * AT_ONCE * rounds, "rounds of eight threads", found)


# --- leaving ------------------------------------------------------------------------------------------------------


def _busy() -> None:
    """Train, read, compile, write to the cache, until the process ends."""
    device = lazytpu.device()
    net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 2)).to(device)
    optimizer = torch.optim.Adam(net.parameters())
    compiled = lazytpu.compile(lambda x: net(x).square().mean())
    for n in range(1 << 30):
        optimizer.zero_grad()
        loss = net(torch.ones(n % 7 + 1, 8, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        lazytpu.mark_step()
        if n % 3 == 0:
            loss.item()
        compiled(torch.ones(2, 8, device=device))


def _ways(cache: Path) -> None:
    lazytpu.config.disk_cache, lazytpu.config.disk_cache_dir = True, str(cache)
    lazytpu.config.compile_after = 1


def _end_of_main(cache: Path, after_s: float) -> None:
    """The main thread ends while a daemon thread works."""
    _ways(cache)
    threading.Thread(target=_busy, daemon=True).start()
    say("begun")
    time.sleep(after_s)


def _exit_beside(cache: Path, after_s: float) -> None:
    _end_of_main(cache, after_s)
    x = torch.ones(3, device=lazytpu.device()) + 1  # pending, and held to the end
    globals()["held"] = x
    sys.exit(3)


def _leave(cache: Path, after_s: float, how: str) -> None:
    """The main thread works, and something makes it leave."""
    _ways(cache)

    def end(*_: object) -> None:
        if how == "os._exit":
            os._exit(3)
        if how == "an exception":
            raise RuntimeError("the end")
        sys.exit(3)

    signal.signal(signal.SIGALRM, end)
    if how != "a signal":
        signal.setitimer(signal.ITIMER_REAL, 0.2 + after_s)
    say("begun")
    _busy()


WAYS = {
    "the end of the main thread": (_end_of_main, (), None, 0),
    "sys.exit beside a thread": (_exit_beside, (), None, 3),
    "sys.exit": (_leave, ("sys.exit",), None, 3),
    "os._exit": (_leave, ("os._exit",), None, 3),
    "an exception": (_leave, ("an exception",), None, 1),
    "Ctrl-C": (_leave, ("a signal",), signal.SIGINT, -2),
    "SIGTERM": (_leave, ("a signal",), signal.SIGTERM, -15),
}
MESSAGES = ("Fatal Python error", "terminate called", "Segmentation", "Aborted", "core dumped", "Exception ignored")


@timed
def exits(count: int, seed: int) -> Result:
    """Leaving the process at any moment, in each of seven ways"""
    found = []
    for n in range(count):
        way = [*WAYS][n % len(WAYS)]
        work, more, number, wanted = WAYS[way]
        after_s, place = random.Random(seed + n).uniform(0, 1.0), folder()
        place.chmod(0o700)
        child = Child(work, place, after_s, *more, ends=True)
        child.hear(60)
        if number is not None:
            time.sleep(after_s)
            child.kill(number)
        ended = child.wait(60)
        traceback = "Traceback" in ended.printed and way not in ("an exception", "Ctrl-C")
        if ended.status != wanted or traceback or any(m in ended.printed for m in MESSAGES):
            found.append(f"{way} {n}: exit status {ended.status}: {ended.printed[-1500:]}")
        shutil.rmtree(place, ignore_errors=True)
    return Result(count, f"moments ({', '.join(WAYS)})", found)
