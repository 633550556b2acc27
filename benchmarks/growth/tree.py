"""The memory of the tree of recorded steps is bounded, when every step is another."""

from __future__ import annotations

import random

import torch

import lazytpu
from benchmarks.growth.process import held
from benchmarks.growth.study import Study, Verdict, growth_in_second_half
from lazytpu.ir.tree import trace

STEPS = 10_000
_SAMPLES = 40
_OPS = 20
_RUN_EVERY = 100  # so many steps give a result, so that something is compiled
_MAX_NODES = 20_000
_MAX_EXECUTABLES = 20
_MEMORY_MB = 8.0


def study(steps: int = STEPS) -> Study:
    """Nodes of the tree and resident memory over steps that are all different.

    The limits of `lazytpu.config` are set low, so that they are met many times.
    """
    kept = lazytpu.config.max_tree_nodes, lazytpu.config.max_executables
    lazytpu.config.max_tree_nodes, lazytpu.config.max_executables = _MAX_NODES, _MAX_EXECUTABLES
    draw = random.Random(0)
    x = torch.ones(3, 4).to(lazytpu.device())
    nodes: list[tuple[float, float]] = []
    memory: list[tuple[float, float]] = []
    most = 0
    try:
        for step in range(steps):
            different_step(x, draw, run=step % _RUN_EVERY == 0)
            most = max(most, trace.nodes)
            if (step + 1) % (steps // _SAMPLES) == 0:
                nodes.append((step + 1, trace.nodes))
                memory.append((step + 1, held().rss_mb))
    finally:
        lazytpu.config.max_tree_nodes, lazytpu.config.max_executables = kept
    verdicts = [
        Verdict("most nodes at the end of a step, to config.max_tree_nodes", most / _MAX_NODES, 1.01),
        Verdict("MiB gained in the second half", growth_in_second_half(memory), _MEMORY_MB),
    ]
    return Study(
        "tree",
        f"Steps that are all different: memory (max_tree_nodes {_MAX_NODES:,})",
        "steps",
        "nodes, and resident MiB",
        {"nodes of the tree": nodes, "resident MiB": memory},
        False,
        verdicts,
    )


def different_step(x: torch.Tensor, draw: random.Random, run: bool) -> None:
    """Records ops that are drawn, and runs them where ``run`` says so."""
    y = x
    for _ in range(_OPS):
        kind = draw.randrange(4)
        y = y + x if kind == 0 else y.relu() if kind == 1 else y * x if kind == 2 else y.neg()
    if run:
        lazytpu.mark_step(wait=True)
    else:
        del y
        lazytpu.mark_step()
