"""Runs programs on the CPU and on the device, and says what differs."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Sequence

import torch

import lazytpu
from tests.fuzz.comparing import differences
from tests.fuzz.program import Program
from tests.fuzz.running import CPU, Outcome, run, start

BATCH = 8
"""Traced programs that become one graph: a compile has its fixed costs."""


def check(program: Program, largest: float = 1e4) -> list[str]:
    """What differs between the two devices.

    Args:
        largest: the largest magnitude of a float in the program.
    """
    return check_together([(program, largest)])[0]


def check_together(programs: Sequence[tuple[Program, float]]) -> list[list[str]]:
    """What differs, for each of some programs whose ends are reached in one graph."""
    device = lazytpu.device()
    expected = [run(program, CPU) for program, _ in programs]
    ends = [start(program, device) for program, _ in programs]
    try:
        lazytpu.mark_step()
    except Exception:  # a graph that cannot be compiled: the reads say it again
        if len(programs) > 1:
            ends.clear()
            return [found for program in programs for found in check_together([program])]
    got = [end() for end in ends]
    ends.clear()
    _forget_failures()
    return [
        _not_torchs_own(program, outcome, differences(program, want, outcome, largest), largest)
        for (program, largest), want, outcome in zip(programs, expected, got, strict=True)
    ]


def _forget_failures() -> None:
    """Lets go of what a graph that cannot be compiled has left, so that it fails no other program."""
    try:
        lazytpu.mark_step()
    except Exception:
        gc.collect()
        with contextlib.suppress(Exception):
            lazytpu.mark_step()


def _not_torchs_own(program: Program, got: Outcome, found: list[str], largest: float) -> list[str]:
    """Leaves out what torch does itself when a function is captured for another backend, on the CPU."""
    if not found or program.mode not in ("jit", "dynamo"):
        return found
    torch._dynamo.reset()
    captured = run(program, CPU, lambda f: torch.compile(f, backend="aot_eager", fullgraph=program.mode == "jit"))
    if "the call" in captured.seen and "the call" in got.seen:
        return []
    return found and differences(program, captured, got, largest)


def batches(seeds: Sequence[int], mode_of: object) -> list[list[int]]:
    """Seeds in groups: traced programs together, others alone."""
    groups: list[list[int]] = []
    traced: list[int] = []
    for seed in seeds:
        if mode_of(seed) != "trace":  # type: ignore[operator]
            groups.append([seed])
            continue
        traced.append(seed)
        if len(traced) == BATCH:
            groups.append(traced)
            traced = []
    return groups + ([traced] if traced else [])
