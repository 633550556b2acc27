"""Runs programs on the CPU and on the device, and says what differs."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

import lazytpu
from tests.fuzz.comparing import differences
from tests.fuzz.program import Program, joinable, joined
from tests.fuzz.running import CPU, Outcome, run, run_together

BATCHES = {"trace": 32, "compile": 8, "jit": 4, "dynamo": 4}
"""How many programs of a mode become one graph: a compile has its fixed costs."""

Given = tuple[Program, float]
BOTH = {"interpreted": 1 << 20, "compiled": 1}
"""The values of ``config.compile_after`` for the runs of a traced program, by what its graphs are then."""


def check(program: Program, largest: float = 1e4, both: bool = False) -> list[str]:
    """What differs between the two devices.

    Args:
        largest: the largest magnitude of a float in the program.
        both: run it twice where it is traced, interpreted and compiled.
    """
    return check_together([(program, largest)], both)[0]


def check_together(programs: Sequence[Given], both: bool = False) -> list[list[str]]:
    """What differs, for each of some programs of one mode that become one graph."""
    traced = programs[0][0].mode == "trace"
    if len(programs) > 1 and not traced:
        together = joined([program for program, _ in programs])
        found = check(together, max(largest for _, largest in programs))
        return [found for _ in programs]
    expected = [run(program, CPU) for program, _ in programs]
    found_of: list[list[str]] = [[] for _ in programs]
    for name in BOTH if both and traced else [""]:
        with compiling(name):
            got = run_together([program for program, _ in programs], lazytpu.device())
            _forget_failures()
        for found, (program, largest), want, outcome in zip(found_of, programs, expected, got, strict=True):
            texts = _not_torchs_own(program, outcome, differences(program, want, outcome, largest), largest)
            found += (f"{name}, {text}" if name else text for text in texts)
    return found_of


@contextlib.contextmanager
def compiling(name: str) -> Iterator[None]:
    """Interpret or compile graphs, where one of `BOTH` is named."""
    kept = lazytpu.config.compile_after
    lazytpu.config.compile_after = BOTH.get(name, kept)
    try:
        yield
    finally:
        lazytpu.config.compile_after = kept


def groups(programs: Iterable[Given]) -> list[list[Given]]:
    """Programs that can become one graph: of one mode, called alike, and compiled with the same options."""
    found: dict[object, list[Given]] = {}
    for n, (program, largest) in enumerate(programs):
        halves = any("float16" in text for text in (*program.inputs, *program.body))
        alone = n if program.mode != "trace" and not joinable(program) else None
        key = (program.mode, program.calls, program.fresh, halves, alone)
        found.setdefault(key, []).append((program, largest))
    return [*found.values()]


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


def batches(seeds: Sequence[int], mode_of: Callable[[int], str]) -> list[list[int]]:
    """Seeds in groups of one mode."""
    groups: list[list[int]] = []
    filling: dict[str, list[int]] = {}
    for seed in seeds:
        mode = mode_of(seed)
        group = filling.setdefault(mode, [])
        group.append(seed)
        if len(group) == BATCHES[mode]:
            groups.append(filling.pop(mode))
    return groups + list(filling.values())
