"""Measured times of HLO instructions, from the trace that jax's profiler writes."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

# Their events contain those of what they call.
CALLS = {"while", "call", "conditional"}


@dataclass
class Measured:
    """Times of one module.

    Attributes:
        runs: how often it ran while the profiler watched.
        seconds: instruction to its time in all runs together.
    """

    runs: int = 0
    seconds: Counter[str] = field(default_factory=Counter)


def measured(folder: Path) -> dict[str, Measured]:
    """Name of a module (``jit_lazytpu_<hash>``) to what its instructions took.

    Args:
        folder: what the profiler wrote to (``run --profile DIR``); the latest trace in it counts.
    """
    traces = sorted(folder.rglob("*.trace.json.gz"), key=lambda path: path.stat().st_mtime)
    if not traces:
        return {}
    with gzip.open(traces[-1]) as file:
        events = json.load(file).get("traceEvents", ())
    found: dict[str, Measured] = {}
    runs: dict[str, set[str]] = {}
    for event in events:
        about = event.get("args", {})
        if event.get("ph") == "X" and "hlo_op" in about:
            module = about.get("hlo_module", "").partition("(")[0]
            found.setdefault(module, Measured()).seconds[about["hlo_op"]] += 1e-6 * event.get("dur", 0.0)
            runs.setdefault(module, set()).add(str(about.get("run_id", "")))
    for module, made in found.items():
        made.runs = len(runs[module])
    return found
