"""Graphs that ask for more memory than there is; memory, file handles and threads of long runs."""

from __future__ import annotations

import gc
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import lazytpu
from tests.faults.children import in_child, say
from tests.faults.results import Result, timed

LIMIT = 2 << 30  # bytes that a process may take beside what it has
ALLOWED_GROWTH = 0.10  # of the memory, from a tenth of the run on: allocators keep some
SAMPLES = 100


def _pages(n: int) -> int:
    return int(Path("/proc/self/statm").read_text().split()[n]) * resource.getpagesize()


def _limit_memory() -> None:
    limit = _pages(0) + LIMIT
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _huge(side: int) -> torch.Tensor:
    return torch.ones(side, 1, device=lazytpu.device()) @ torch.ones(1, side, device=lazytpu.device())


GRAPHS: dict[str, Callable[[torch.Tensor, int], object]] = {
    "a result": lambda x, side: _huge(side) + x[0],
    "an intermediate": lambda x, side: (_huge(side).sort(0)[0] * x[0]).cumsum(1).flip(0).sum(),
    "a write": lambda x, side: torch.zeros(side, side, device=x.device).add_(x[0]),
    "a gather": lambda x, side: x.expand(side, -1).repeat(1, side // len(x)).cumsum(0),
    "a copy to the CPU": lambda x, side: (_huge(side // 2) + x[0]).cpu().double().cumsum(0),
}


def _too_much(name: str, donated: bool, compile_after: int) -> None:
    lazytpu.config.compile_after = compile_after
    device = lazytpu.device()
    kept, x = torch.arange(8.0).to(device), torch.ones(8).to(device)
    lazytpu.mark_step()
    (x + 1).sum().item()
    _limit_memory()
    if donated:
        x.add_(1)
    raised = None
    held: list[object] = []
    try:
        held.append(GRAPHS[name](x, 40_000))
        lazytpu.wait()
    except (RuntimeError, MemoryError) as error:
        raised = f"{type(error).__name__}: {error}"
    say(raised)
    held.clear()
    gc.collect()
    assert x.tolist() == [2.0 if donated else 1.0] * 8 and kept.tolist() == [*map(float, range(8))]
    assert (x + kept).sum().item() == 28 + (16 if donated else 8)


@timed
def out_of_memory(count: int, seed: int) -> Result:
    """Graphs that need more memory than the process may have"""
    found = []
    for n in range(count):
        name, donated, compile_after = [*GRAPHS][n % len(GRAPHS)], bool(n // 5 % 2), 1 + n // 10 % 2
        ended = in_child(_too_much, name, donated, compile_after)
        if ended.problem or not ended.said or not ended.said[0]:
            found.append(f"{name}, donated {donated}, {compile_after}: {ended.said} {ended.problem}")
    return Result(count, f"graphs with {', '.join(GRAPHS)} that is too large", found)


def _figures(done: int) -> list[float]:
    tasks, handles = (len(os.listdir(f"/proc/self/{name}")) for name in ("task", "fd"))
    return [done, _pages(1) / 1e6, handles, tasks]


def _train(steps: int, seconds: float) -> None:
    torch.manual_seed(0)
    device, end = lazytpu.device(), time.monotonic() + seconds
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    x = torch.randn(16, 8).to(device)
    for n in range(steps + 1):
        if n % max(1, steps // SAMPLES) == 0:
            lazytpu.wait()
            say(_figures(n))
            if time.monotonic() > end:
                return
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
        lazytpu.mark_step()


def _shapes(shapes: int, seconds: float) -> None:
    device, end = lazytpu.device(), time.monotonic() + seconds
    for n in range(shapes + 1):
        if n % max(1, shapes // SAMPLES) == 0:
            say(_figures(n))
            if time.monotonic() > end:
                return
        x = torch.ones(n % 100 + 1, n // 100 + 1).to(device)
        for _ in range(2 if n % 10 == 0 else 1):  # what comes again is compiled
            assert ((x * 2 + 1).tanh() > 0).sum().item() == x.numel()


def _flat(work: Callable[[int, float], None], count: int, what: str, seconds: float = 400) -> Result:
    ended = in_child(work, count, seconds, timeout_s=seconds + 100)
    rows, found = ended.said, [*filter(None, [ended.problem])]
    if len(rows) > 2:
        settled = rows[max(1, len(rows) // 10)]
        if rows[-1][1] > settled[1] * (1 + ALLOWED_GROWTH):
            found.append(f"memory has grown from {settled[1]:.0f} to {rows[-1][1]:.0f} MB")
        if rows[-1][2] > settled[2] + 2 or rows[-1][3] > settled[3] + 2:
            found.append(f"handles and threads have grown: {settled[2:]} to {rows[-1][2:]}")
    columns = {name: [row[i] for row in rows] for i, name in enumerate(("done", "mb", "handles", "threads"))}
    return Result(int(rows[-1][0]) if rows else 0, what, found, more=columns)


@timed
def steps(count: int, seed: int) -> Result:
    """Memory, file handles and threads of a long training"""
    return _flat(_train, count, "training steps")


@timed
def shapes(count: int, seed: int) -> Result:
    """Memory, file handles and threads with many distinct shapes"""
    return _flat(_shapes, count, "distinct shapes, a tenth of them twice")
