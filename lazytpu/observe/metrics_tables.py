"""Describe what a step cost, and print tables of it and other metrics."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from io import StringIO
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table


class Step(NamedTuple):
    """What one step cost.  Times are in seconds, sizes in bytes.

    The times from ``python_s`` to ``transferring_s`` add up to ``total_s``; what a `DeviceLoader`'s thread transfers
    meanwhile is in ``background_s``.  The device runs in parallel to all of them.  Writing a dump is left out.

    Attributes:
        number: counts from 1.
        ended: when the step ended, in seconds since 1970.
        total_s: from the end of the step before to the end of this one.
        python_s: Python and torch, and recording where it is not measured separately.
        recording_s: lazytpu's kernels, estimated (tracing/record_time.py), and inferring the types of new ops; None
            unless ``lazytpu.config.metrics`` is on.
        cutting_s: finding what is live and storing results.
        lowering_s, compiling_s: our rules and jax's tracing; XLA.
        loading_s: reading and writing the cache of compiled graphs on disk.
        dispatching_s: starting compiled graphs.
        interpreting_s: running new graphs op by op.
        waiting_s: for the device, when something was read.
        transferring_s: copying to and from the device.
        background_s: transfers on the threads of `DeviceLoader`.
        running_s: the device at work, from timed runs; None unless ``lazytpu.config.metrics`` is on.
        ops: recorded.
        cuts, compiles, cache_hits, executions: graphs ended, compiled, found compiled, and started.
        donations: buffers whose memory went to results; ``donated_bytes`` is their size.
        fallbacks: ops that ran on the CPU.
        transfers_in, bytes_in, transfers_out, bytes_out: copies to and from the device.
    """

    number: int
    ended: float
    total_s: float
    python_s: float
    recording_s: float | None
    cutting_s: float
    lowering_s: float
    compiling_s: float
    loading_s: float
    dispatching_s: float
    interpreting_s: float
    waiting_s: float
    transferring_s: float
    background_s: float
    running_s: float | None
    ops: int
    cuts: int
    compiles: int
    cache_hits: int
    executions: int
    donations: int
    donated_bytes: int
    fallbacks: int
    transfers_in: int
    bytes_in: int
    transfers_out: int
    bytes_out: int


SHOWN_STEPS = 5
_WIDTH = 100

_TIMES = {
    "Python and torch": "python_s",
    "recording": "recording_s",
    "cutting": "cutting_s",
    "lowering": "lowering_s",
    "XLA": "compiling_s",
    "disk cache": "loading_s",
    "starting": "dispatching_s",
    "interpreting": "interpreting_s",
    "waiting": "waiting_s",
    "transfers": "transferring_s",
    "step": "total_s",
    "device running": "running_s",
    "loader's transfers": "background_s",
}
_COUNTS = {
    "ops": "ops",
    "graphs run": "executions",
    "cuts": "cuts",
    "compiles": "compiles",
    "fallbacks": "fallbacks",
    "buffers donated": "donations",
}
_SIZES = {"donated": "donated_bytes", "bytes in": "bytes_in", "bytes out": "bytes_out"}


def amount(number: float) -> str:
    """Return ``1.23 M``: three digits and a prefix."""
    for unit in ("", " K", " M", " G", " T", " P"):
        if abs(number) < 1000:
            return f"{number:.0f}" if not unit else f"{number:.3g}{unit}" if number < 999.5 else f"{number:.0f}{unit}"
        number /= 1000
    return f"{number:.3g} E"


def size(number: float) -> str:
    """Return ``1.23 MB``."""
    text = amount(number)
    return f"{text}B" if " " in text else f"{text} B"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], title: str = "", left: int = 1) -> Table:
    """Return a table whose first ``left`` columns are text and the others numbers."""
    made = Table(
        box=box.SIMPLE_HEAD,
        title=title or None,
        title_justify="left",
        title_style="bold",
        caption_justify="left",
        pad_edge=False,
    )
    for i, head in enumerate(heads):
        if i < left:
            made.add_column(head, overflow="fold")
        else:
            made.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        made.add_row(*row)
    return made


def tables(
    steps: Sequence[Step],
    counters: Mapping[str, int],
    timers: Mapping[str, tuple[int, float]],
    fallbacks: Mapping[str, int],
) -> list[Table]:
    """Return the tables of `lazytpu.metrics.report`."""
    found = [steps_table(steps)] if steps else []
    found.append(table(("counter", "count"), [(name, f"{n:,}") for name, n in counters.items()]))
    rows = [(name, f"{n:,}", f"{total:.3f}", f"{1e3 * total / n:.3f}") for name, (n, total) in timers.items()]
    found.append(table(("timer", "count", "seconds", "ms each"), rows))
    if fallbacks:
        found.append(table(("fallback to the CPU", "count"), [(name, f"{n:,}") for name, n in fallbacks.items()]))
    return found


def text_of(found: Sequence[Table]) -> str:
    """Return tables as plain text."""
    out = StringIO()
    console = Console(file=out, width=_WIDTH, color_system=None, force_terminal=False, legacy_windows=False)
    for each in found:
        console.print(each)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().lstrip("\n").splitlines())


def steps_table(steps: Sequence[Step]) -> Table:
    """Return a table with a column for each of the last steps, and one for the mean of those that compiled nothing."""
    shown = list(steps[-SHOWN_STEPS:])
    steady = [s for s in steps if not _made_graphs(s)] or list(steps)
    made = table(["ms", "mean*", "share", *[f"step {s.number}" for s in shown]], [])
    total = _mean(steady, "total_s") or 1.0
    for name, field in _TIMES.items():
        mean = _mean(steady, field)
        share = "-" if mean is None else f"{100 * mean / total:.0f} %"
        row = [_milliseconds(mean), share, *[_milliseconds(getattr(s, field)) for s in shown]]
        made.add_row(name, *row, end_section=field in ("transferring_s", "background_s"))
    for name, field in _COUNTS.items():
        made.add_row(name, f"{_mean(steady, field):,.4g}", "", *[f"{getattr(s, field):,}" for s in shown])
    for name, field in _SIZES.items():
        made.add_row(name, size(_mean(steady, field) or 0), "", *[size(getattr(s, field)) for s in shown])
    kept = f"of the last {len(steps)} steps"
    made.caption = (
        f"* {kept}, all of which compiled" if _made_graphs(steady[0]) else f"* of those {kept} that compiled nothing"
    )
    return made


def _made_graphs(step: Step) -> bool:
    """Return whether a step compiled a graph or loaded one from disk."""
    return step.compiles > 0 or step.loading_s > 0


def _mean(steps: Sequence[Step], field: str) -> float | None:
    values = [getattr(s, field) for s in steps if getattr(s, field) is not None]
    return sum(values) / len(values) if values else None


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.2f}" if seconds < 1 else f"{1e3 * seconds:,.0f}"
