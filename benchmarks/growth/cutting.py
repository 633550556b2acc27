"""mark_step costs the same for each tensor that is alive, however many there are."""

from __future__ import annotations

import gc
import time

import torch

import lazytpu
from benchmarks.growth.study import Points, Study, Verdict, ratio_of_rates

SIZES = (10, 30, 100, 300, 1_000, 3_000, 10_000)
_REPEATS = 5
_LIMIT = 1.5


def study(sizes: tuple[int, ...] = SIZES) -> Study:
    """Seconds of ``mark_step`` with a known program that gives, or overwrites, that many tensors."""
    results: Points = [(size, cut_results(size)) for size in sizes]
    overwritten: Points = [(size, cut_overwritten(size)) for size in sizes]
    verdicts = [
        Verdict("time a new tensor at the most, to that at fewer", ratio_of_rates(results), _LIMIT),
        Verdict("time an overwritten tensor at the most, to that at fewer", ratio_of_rates(overwritten), _LIMIT),
    ]
    series: dict[str, Points] = {"new tensors": results, "overwritten tensors": overwritten}
    return Study("cutting", "mark_step is linear", "live tensors", "seconds", series, True, verdicts)


def cut_results(size: int) -> float:
    """Seconds to cut a step that makes ``size`` tensors; the best of several, after the one that compiles."""
    x = torch.ones(2, 2).to(lazytpu.device())
    best = float("inf")
    for i in range(_REPEATS + 1):
        made = [x + x for _ in range(size)]
        seconds = _cut()
        best = seconds if i == 1 else min(best, seconds)
        del made
    return best


def cut_overwritten(size: int) -> float:
    """Seconds to cut a step that adds to ``size`` tensors in place, as an optimizer does."""
    x = torch.ones(2, 2).to(lazytpu.device())
    tensors = [torch.zeros(2, 2).to(x.device) for _ in range(size)]
    best = float("inf")
    for i in range(_REPEATS + 2):  # the first two compile: nothing can be donated in the first
        torch._foreach_add_(tensors, 1.0)
        seconds = _cut()
        best = seconds if i <= 2 else min(best, seconds)
    return best


def _cut() -> float:
    gc.collect()
    start = time.process_time()
    lazytpu.mark_step()
    seconds = time.process_time() - start
    lazytpu.wait()
    return seconds
