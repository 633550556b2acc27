"""Recording an op costs the same, however many the step has already."""

from __future__ import annotations

import gc
import time

import torch

import lazytpu
from benchmarks.growth.study import Points, Study, Verdict, ratio_of_rates

SIZES = (100, 300, 1_000, 3_000, 10_000, 30_000, 100_000)
_REPEATS = 3
_LIMIT = 1.5
_COLLECTED_LIMIT = 2.5


def study(sizes: tuple[int, ...] = SIZES) -> Study:
    """Seconds to record a step of that many ops, the first time and again.

    Nothing of it is alive at the cut, so that nothing is compiled.  An op that is recorded the first time makes a
    node that stays, and Python's garbage collector goes through all there is each time it has grown by a quarter; so
    the first time is judged without the collector, and more strictly than with it.
    """
    largest = max(sizes)
    kept = lazytpu.config.max_graph_ops, lazytpu.config.max_tree_nodes
    lazytpu.config.max_graph_ops, lazytpu.config.max_tree_nodes = 2 * largest, 20 * largest
    try:
        x = torch.ones(3, 4).to(lazytpu.device())
        lazytpu.mark_step()
        record(x, 10, 0)
        collected: list[tuple[float, float]] = []
        first: list[tuple[float, float]] = []
        again: list[tuple[float, float]] = []
        for number, size in enumerate(sizes):
            collected.append((size, record(x, size, 2 * number + 1)))
            gc.disable()
            first.append((size, record(x, size, 2 * number + 2)))
            gc.enable()
            again.append((size, min(record(x, size, 2 * number + 2) for _ in range(_REPEATS))))
    finally:
        gc.enable()
        lazytpu.config.max_graph_ops, lazytpu.config.max_tree_nodes = kept
    verdicts = [
        Verdict("time an op at the most ops, first time, to that at fewer", ratio_of_rates(first), _LIMIT),
        Verdict("the same with Python's garbage collector", ratio_of_rates(collected), _COLLECTED_LIMIT),
        Verdict("time an op at the most ops, recorded before, to that at fewer", ratio_of_rates(again), _LIMIT),
    ]
    series: dict[str, Points] = {
        "first time": first,
        "first time, with Python's garbage collector": collected,
        "recorded before": again,
    }
    return Study("recording", "Recording is linear", "ops in the step", "seconds", series, True, verdicts)


def record(x: torch.Tensor, size: int, path: int) -> float:
    """Seconds to record a chain of ``size`` additions; each ``path`` begins another branch of the tree."""
    y = x
    for bit in f"{path:b}":
        y = y.neg() if bit == "1" else y.relu()
    gc.collect()
    start = time.process_time()
    for _ in range(size):
        y = y + x
    seconds = time.process_time() - start
    del y
    lazytpu.mark_step()
    return seconds
