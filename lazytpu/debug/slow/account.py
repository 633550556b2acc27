"""The account of a step as text, for `lazytpu.explain`, and as a table, for the report."""

from __future__ import annotations

from collections.abc import Iterator

from lazytpu.debug import op_times
from lazytpu.debug.folder import JsonObject
from lazytpu.debug.slow.costly_lines import Lines, device_lines, host_lines
from lazytpu.debug.slow.findings import LEAST, Finding, findings
from lazytpu.debug.slow.steady import PARTS, StepTime, step_time

_SHOWN = 0.005  # part of a step from which on a row is shown


def text() -> list[str]:
    """Return lines of text; none where too few steps were made."""
    step = step_time()
    if step is None:
        return []
    costliest = [line for lines in _lines_of(step) for line in _costliest(lines)]
    return [*_where(step), *costliest, *_saved(step, findings(step))]


def table() -> JsonObject:
    """Return the same as data; empty where too few steps were made."""
    step = step_time()
    if step is None:
        return {}
    return {
        "steps": step.steps,
        "steady": step.steady,
        "unit": step.unit,
        "total_s": step.total_s,
        "parts": [[PARTS[name], seconds] for name, seconds in step.parts.items()],
        "bound": _verdict(step),
        "lines": [
            {"how": lines.how, "rows": [[row.site.describe(), row.share, list(row.ops)] for row in lines.rows]}
            for lines in _lines_of(step)
        ],
        "findings": [found._asdict() for found in findings(step)],
    }


def _lines_of(step: StepTime) -> list[Lines]:
    """Return the costliest lines of the side that is the limit, and those that a profile has measured."""
    if step.bound != "host" or not step.ops:
        return [device_lines()]
    return [host_lines(), *([device_lines()] if op_times.measured else [])]


def _where(step: StepTime) -> Iterator[str]:
    which = "steady" if step.steady else "of the last, none of them steady,"
    yield f"where the time of a {step.unit} goes: {_ms(step.total_s)}, the mean of {step.steps} {which} {step.unit}s"
    for name, seconds in step.parts.items():
        if step.share(seconds) >= _SHOWN:
            yield f"  {_ms(seconds):>10} {_percent(step.share(seconds)):>5}  {PARTS[name]}"
    yield f"  {_verdict(step)}"


def _verdict(step: StepTime) -> str:
    """Return what limits a step, and by how much."""
    if step.bound == "compiler":
        return "compiling is the limit: most steps have a new program"
    if step.bound == "loader":
        return "the loader is the limit: batches come more slowly than they are used"
    host_s, device_s = step.host_s, step.device_s
    least = "" if step.measured else " at least"
    if step.bound == "device":
        times = device_s / host_s if host_s else 0.0
        return f"device-bound: the device works{least} {_ms(device_s)}, {times:.1f} x the {_ms(host_s)} of the host"
    if not step.measured:
        waits = _percent(step.share(step.parts["waiting_s"]))
        hint = "lazytpu.config.metrics = True measures the device"
        return f"host-bound: the host works {_ms(host_s)} and waits for the device {waits} of the {step.unit} ({hint})"
    compared = f", {host_s / device_s:.1f} x the {_ms(device_s)} of the device" if device_s else ""
    return f"host-bound: the host works {_ms(host_s)}{compared}"


def _costliest(lines: Lines) -> Iterator[str]:
    if lines.rows:
        yield f"the costliest lines, {lines.how}"
    for row in lines.rows:
        yield f"  {_percent(row.share):>5}  {row.site.describe()}: {', '.join(row.ops)}"


def _saved(step: StepTime, found: list[Finding]) -> Iterator[str]:
    if not found:
        yield f"nothing was found that could be saved and costs {_percent(LEAST)} of a {step.unit}"
        return
    yield f"what could be saved in a {step.unit}, the costliest first"
    for number, each in enumerate(found, 1):
        yield f"  {number}  {_ms(each.costs_s)} ({_percent(step.share(each.costs_s))}): {each.text}"
        for label, said in (("at", each.line), ("fix", each.fix)):
            if said:
                yield f"     {label:<4} {said}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
