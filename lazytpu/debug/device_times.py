"""Read the times of HLO instructions from the trace that jax's profiler writes for Perfetto."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from lazytpu.debug.folder import JsonObject

# Their events contain those of the instructions they run.
CALLS = {"while", "call", "conditional"}


@dataclass
class DeviceTimes:
    """Times of one module.

    Attributes:
        runs: how often it ran while the profiler watched.
        seconds: instruction to its time in all runs together.
    """

    runs: int = 0
    seconds: Counter[str] = field(default_factory=Counter)


def latest_trace(folder: Path) -> Path | None:
    """Return the file of the latest trace in a folder that the profiler wrote to; None where there is none."""
    return max(folder.rglob("*.trace.json.gz"), key=lambda path: path.stat().st_mtime, default=None)


def read_trace(path: Path) -> JsonObject:
    """Read a trace in Chrome's format, which Perfetto opens."""
    with gzip.open(path) as file:
        made: JsonObject = json.load(file)
    return made


def device_times(folder: Path) -> dict[str, DeviceTimes]:
    """Return the times of each module (``jit_lazytpu_<hash>``) in the latest trace of a folder."""
    path = latest_trace(folder)
    found: dict[str, DeviceTimes] = {}
    runs: dict[str, set[str]] = {}
    for event in read_trace(path).get("traceEvents", ()) if path is not None else ():
        about = event.get("args", {})
        if event.get("ph") == "X" and "hlo_op" in about:
            module = about.get("hlo_module", "").partition("(")[0]
            found.setdefault(module, DeviceTimes()).seconds[about["hlo_op"]] += 1e-6 * event.get("dur", 0.0)
            runs.setdefault(module, set()).add(str(about.get("run_id", "")))
    for module, times in found.items():
        times.runs = len(runs[module])
    return found
