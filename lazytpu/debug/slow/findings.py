"""What of a step could be saved: each finding with what it costs, the line and the fix.

Costs are seconds of a mean step that are gone where the finding is: those that were counted there, or for a choice
(`lazytpu.compile`, another dtype) what it would save at most, estimated.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch

from lazytpu.config import config
from lazytpu.debug.slow import graph_costs
from lazytpu.debug.slow.costly_lines import Line, cost_of, host_lines
from lazytpu.debug.slow.steady import StepTime
from lazytpu.diagnosis import events
from lazytpu.diagnosis.events import Tally

LEAST = 0.05
"""Part of a step below which a finding is left out."""

_PYTHON_S = 2e-4  # an op, from which on it is not recording that takes the host's time
_FEW_OPS = 20
_MANY_CUTS = 3  # in a step, from which on they are what takes the host's time
_MANY_COPIES = 4  # to the device, a step and line
_OFTEN = 0.5  # in a step; what happens less often was before the first
_NO_READS = ("lazytpu.compile", "torch.compile", "mark_step", "forget", "plan", "eager", "debug", "max_graph_ops")
_PLACE = re.compile(r"\bat (\S+:\d+.*)$")
_READ_FIXES = (
    ("bool", "torch.where keeps the choice on the device; or decide every 50th step"),
    ("aten.", "its result's size depends on values: torch.where, or a mask to multiply with, keeps the size"),
    ("copy", "copy after the loop, or every 50th step"),
    ("wait", "leave it out: reading waits by itself"),
    ("", "read it every 50th step; keep .detach() of it until then"),
)


class Finding(NamedTuple):
    """Something that a step could be saved.

    Attributes:
        kind: one of `KINDS`.
        text: what happens.
        line: where, as ``train.py:12  Net.c1``.
        fix: what to do about it.
        costs_s: seconds of a step.
    """

    kind: str
    text: str
    line: str
    fix: str
    costs_s: float


def findings(step: StepTime) -> list[Finding]:
    """Return what costs at least `LEAST` of a step, the costliest first."""
    found = [each for find in KINDS.values() for each in find(step)]
    found = [f._replace(costs_s=min(f.costs_s, step.total_s)) for f in found]
    return sorted([f for f in found if step.share(f.costs_s) >= LEAST], key=lambda f: -f.costs_s)


def _settings(step: StepTime) -> Iterator[Finding]:
    if config.eager:
        text = "each op runs by itself, as lazytpu.config.eager is on"
        yield Finding("setting", text, "lazytpu.config.eager", "turn it off (LAZYTPU_EAGER)", step.total_s)
    if torch.is_anomaly_enabled():
        text = "torch.autograd's anomaly mode keeps a stack for each op"
        fix = "turn it off: torch.autograd.set_detect_anomaly(False)"
        yield Finding("setting", text, "torch.autograd.set_detect_anomaly", fix, 0.5 * step.host_s)


def _compiled(step: StepTime) -> Iterator[Finding]:
    """Graphs that keep being compiled: what recording a new graph takes is a part of it."""
    last = events.compilations[-max(1, round(step.compiles * step.steps)) :]
    if step.steady or step.compiles < 0.1 or not last:
        return
    places: dict[str, list[events.Compilation]] = {}
    for event in last:
        places.setdefault(event.cause.site.describe(), []).append(event)
    for line, found in places.items():
        cause = found[-1].cause
        text = f"{len(found)} graphs were compiled in {step.steps} {step.unit}s; the last {cause.headline}"
        yield Finding("compile", text, line, cause.fix, step.parts["compiling_s"] * len(found) / len(last))


def _interpreted(step: StepTime) -> Iterator[Finding]:
    """Graphs that are new each time and run op by op."""
    total = sum(events.interpretations.values())
    if step.steady or not step.parts["interpreting_s"]:
        return
    counts: dict[str, int] = {}
    for (_, line), n in events.interpretations.items():
        counts[line] = counts.get(line, 0) + n
    for line, n in counts.items():
        cause = events.new_graphs[line]
        text = f"{n} of {step.noted} {step.unit}s ran op by op, as their graph was new; the last {cause.headline}"
        costs_s = step.parts["interpreting_s"] + step.parts["python_s"]  # a new graph takes long to record
        yield Finding("interpret", text, line, cause.fix, costs_s * n / total)


def _fallbacks(step: StepTime) -> Iterator[Finding]:
    for (op, line), tally in events.fallbacks.items():
        text = f"{op} has no lowering and runs on the CPU, {_often(tally, step)}"
        fix = "use ops that have one, or add a rule: docs/how-to/add-an-op"
        yield Finding("fallback", text, line, fix, tally.seconds / step.noted)


def _reads(step: StepTime) -> Iterator[Finding]:
    """Reads that wait: the host could record the next step meanwhile, and the device run the next program."""
    kept = _read_tallies()
    stalls = {key: t.count * min(t.seconds / t.count, step.host_s) for key, t in kept.items()}
    stalled = sum(stalls.values()) or 1.0
    saved_s = min(stalled / step.noted, step.parts["waiting_s"], step.host_s)
    cut_s = step.host_s / max(1.0, step.executions)
    for (what, line), tally in kept.items():
        costs_s = saved_s * stalls[what, line] / stalled
        if step.executions > _MANY_CUTS and (what, line) in events.cuts:
            costs_s += cut_s * tally.count / step.noted
        ms = 1e3 * tally.seconds / tally.count
        text = f"{what} waits for the device, {_often(tally, step)}, {ms:.2f} ms each"
        fix = next(fix for start, fix in _READ_FIXES if what.startswith(start))
        yield Finding("read", text, line, fix, costs_s)


def _read_tallies() -> Mapping[tuple[str, str], Tally]:
    """Return reads and what they cut, together where a line did both."""
    kept: dict[tuple[str, str], Tally] = {}
    for tallies in (events.cuts, events.reads):
        for key, tally in tallies.items():
            if not key[0].startswith(_NO_READS) and key[1] != "?":
                both = kept.setdefault(key, Tally())
                both.count += tally.count
                both.seconds += tally.seconds
    return kept


def _transfers(step: StepTime) -> Iterator[Finding]:
    for site, tally in events.uploads.items():
        each = tally.count / step.noted
        if min(each, step.copies) < _OFTEN:
            continue
        text = f"{tally.nbytes // tally.count:,} bytes are copied to the device, {_often(tally, step)}"
        many = each >= _MANY_COPIES
        fix = (
            "make them on the device (torch.full, torch.arange with device=), or move them as one tensor"
            if many
            else "let lazytpu.DeviceLoader(loader) copy the next batch meanwhile; what stays the same, copy once"
        )
        yield Finding("transfer", text, site.describe(), fix, tally.seconds / step.noted)


def _loader(step: StepTime) -> Iterator[Finding]:
    for site, tally in events.batches.items():
        text = f"the next batch is not there yet, {1e3 * tally.seconds / max(1, tally.count):.2f} ms each time"
        fix = "make batches in other processes, DataLoader(num_workers=...), or do less for each"
        yield Finding("loader", text, site.describe(), fix, tally.seconds / step.noted)


def _host(step: StepTime) -> Iterator[Finding]:
    """A host-bound step: what `lazytpu.compile` would replay, what keeps it from that, or Python itself."""
    if not step.steady or step.bound != "host" or config.eager:
        return
    if step.executions > _MANY_CUTS or step.copies > max(step.ops, _FEW_OPS):
        return  # cutting, or copying, is what takes the time
    saved_s = step.parts["python_s"] + step.parts["recording_s"] + step.parts["cutting_s"]
    elsewhere = sum(t.seconds for t in (*events.fallbacks.values(), *events.uploads.values())) / step.noted
    saved_s -= max(0.0, elsewhere - step.parts["transferring_s"])
    saved_s = min(saved_s, step.host_s - step.device_s)
    problems = [*_unreplayed(step, saved_s)]
    if problems:
        yield from problems
    elif saved_s > _PYTHON_S * max(step.ops, _FEW_OPS) or not step.ops:
        text = f"Python works outside of torch: a {step.unit} records {step.ops:.0f} ops"
        yield Finding(
            "python", text, "", "find it with cProfile or py-spy; lazytpu.DeviceLoader takes batches off", saved_s
        )
    elif lines := host_lines().rows:
        text = f"the host records {step.ops:.0f} ops in each {step.unit}, {100 * lines[0].share:.0f} % of them here"
        yield Finding("host", text, lines[0].site.describe(), _host_fix(lines[0]), saved_s)


def _host_fix(line: Line) -> str:
    fix = "@lazytpu.compile on the function that makes the whole step: it is replayed without its Python"
    on_lists = any(op.startswith(("aten._foreach", "aten._fused")) for op in line.ops)
    if not on_lists and ".step(" in linecache.getline(line.site.file, line.site.line):
        return f"the optimizer with foreach=True or fused=True; or {fix}"
    return fix


def _unreplayed(step: StepTime, saved_s: float) -> Iterator[Finding]:
    for function, problem in events.unreplayed:
        found = _PLACE.search(problem)
        text = f"{function} is recorded in every call: {problem}"
        fix = "make what changes an argument, or a tensor of the device that the function updates; read outside of it"
        line = found[1] if found else events.functions[function].describe()
        yield Finding("unreplayed", text, line, fix, saved_s)
    for (function, change), n in events.rerecorded.items():
        text = f"{function} is recorded again, {n} x in {step.noted} {step.unit}s: {change}"
        fix = "make what changes an argument, or a tensor of the device"
        line = events.functions[function].describe()
        yield Finding("unreplayed", text, line, fix, saved_s * min(1.0, 2 * n / step.noted))


def _dtypes(step: StepTime) -> Iterator[Finding]:
    part, site, node = cost_of(graph_costs.is_in_slow_dtype)
    if site is not None and node is not None:
        costs_s = part * step.device_s * graph_costs.saved_by_float32(node)
        text, fix = graph_costs.dtype_text(node)
        yield Finding("dtype", text, site.describe(), fix, costs_s)


def _layouts(step: StepTime) -> Iterator[Finding]:
    part, site, node = cost_of(graph_costs.is_laid_out_anew)
    if site is not None and node is not None:
        text, fix = graph_costs.layout_text(node)
        yield Finding("layout", text, site.describe(), fix, part * step.device_s)


def _cuts(step: StepTime) -> Iterator[Finding]:
    """Graphs that are cut because nothing ends a step."""
    for (what, line), tally in events.cuts.items():
        if what == "max_graph_ops":
            text = f"a graph is cut at {config.max_graph_ops:,} ops, as nothing ends a step, {_often(tally, step)}"
            yield Finding("no step", text, line, "call lazytpu.mark_step() at the end of each step", step.host_s)


KINDS: dict[str, Callable[[StepTime], Iterator[Finding]]] = {
    "setting": _settings,
    "compile": _compiled,
    "interpret": _interpreted,
    "fallback": _fallbacks,
    "read": _reads,
    "transfer": _transfers,
    "loader": _loader,
    "host": _host,
    "dtype": _dtypes,
    "layout": _layouts,
    "no step": _cuts,
}
"""What finds each kind; ``python`` and ``unreplayed`` are what a ``host`` finding turns out to be."""


def _often(tally: Tally, step: StepTime) -> str:
    """Return ``once in each step``, ``3.0 x a step`` or ``5 x in 200 steps``."""
    each = tally.count / step.noted
    if 0.9 < each < 1.1:
        return f"once in each {step.unit}"
    return f"{each:.1f} x a {step.unit}" if each > 1 else f"{tally.count} x in {step.noted} {step.unit}s"
