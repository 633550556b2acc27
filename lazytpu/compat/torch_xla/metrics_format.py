"""Write our measurements in the format of torch_xla's metrics report, under its names.

Measurements that only torch_xla makes are left out.  The format is that of torch_xla's ``MetricFnTime`` and
``MetricFnBytes``: times from days to microseconds, sizes in powers of 1024.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

from lazytpu.diagnosis import events
from lazytpu.diagnosis.events import Compilation
from lazytpu.observe import metrics
from lazytpu.observe.metrics import Series
from lazytpu.observers import Observer, add

PERCENTILES = (1, 5, 10, 20, 50, 80, 90, 95, 99)

METRICS = {
    "CompileTime": "compile",
    "ExecuteTime": "run",
    "TransferFromDeviceTime": "transfer_out",
    "TransferToDeviceTime": "transfer_in",
    "LowerTime": "lower",
    "DispatchTime": "dispatch",
    "WaitTime": "wait",
    "CutTime": "cut",
}
"""Name in the report to the timer it shows; the last four are ours alone."""

SIZES = {"InboundData": "transfer_out", "OutboundData": "transfer_in"}
"""Name in the report to the transfer whose bytes it shows, from the host's point of view."""

COUNTERS = {
    "UncachedCompile": "compile",
    "CachedCompile": "cache_hit",
    "MarkStep": "step",
    "ExecuteGraph": "execute",
    "ExecuteReplicated": "execute",
    "DonatedBuffers": "donated",
    "VirtualDeviceUsage": "resharded",
    "CreateOpSharding": "spec",
    "ReplicateShardedData": "gathered",
    "CompileWithAutoSharding": "auto_sharded",
}
"""Name in the report to the counter it shows; ExecuteGraph and DonatedBuffers are ours alone."""


class _Aliases(Observer):
    """Keeps how many inputs of each graph that is compiled or loaded are given to its results."""

    def __init__(self) -> None:
        self.counts = Series()

    def graph_compiled(self, compilation: Compilation) -> None:
        self.counts.add(len(compilation.graph.donated))

    def metrics_reset(self) -> None:
        self.counts.clear()


_aliases = _Aliases()
add(_aliases)
NUMBERS = {"InputOutputAliasCount": _aliases.counts}
"""Name in the report to the numbers it shows."""


def report() -> str:
    """Return the report of this process as text.

    Metrics such as CompileTime, ExecuteTime and TransferToDeviceTime with their percentiles; counters such as
    UncachedCompile, CachedCompile and MarkStep; ``xla::<op>`` for what ran on the device and ``aten::<op>`` for what
    fell back to the CPU.
    """
    ops = dict(events.op_counts())
    return text_of(metrics.all_timers(), metrics.all_sizes(), metrics.counters(), metrics.fallbacks(), ops, NUMBERS)


def text_of(
    timers: Mapping[str, Series],
    sizes: Mapping[str, Series],
    counters: Mapping[str, int],
    fallbacks: Mapping[str, int],
    ops: Mapping[str, int],
    numbers: Mapping[str, Series],
) -> str:
    """Return the report as text.

    Args:
        timers, sizes: in seconds and bytes, under our names.
        counters: under our names.
        fallbacks, ops: aten names (``aten.add.Tensor``) to how often they ran on the CPU and on the device.
        numbers: under the names in the report.
    """
    lines: list[str] = []
    shown = dict(METRICS)
    if not timers.get("run", Series()).count:  # not sampled: what is known is how long starting takes
        shown["ExecuteTime"] = shown.pop("DispatchTime")
    found: list[tuple[str, Series, Callable[[float], str]]] = []
    found += [(name, timers[ours], time_text) for name, ours in shown.items() if ours in timers]
    found += [(name, sizes[ours], size_text) for name, ours in SIZES.items() if ours in sizes]
    found += [(name, series, "{:.2f}".format) for name, series in numbers.items()]
    for name, series, write in sorted(found, key=lambda entry: entry[0]):
        if series.count:
            lines += _metric(name, series, write)
    for name, value in sorted(_counters(counters, fallbacks, ops)):
        lines += [f"Counter: {name}", f"  Value: {value}"]
    return "".join(f"{line}\n" for line in lines)


def _counters(
    counters: Mapping[str, int], fallbacks: Mapping[str, int], ops: Mapping[str, int]
) -> Iterator[tuple[str, int]]:
    yield from ((name, counters[ours]) for name, ours in COUNTERS.items() if counters.get(ours))
    for prefix, given in (("aten", fallbacks), ("xla", ops)):
        merged: dict[str, int] = {}
        for op, n in given.items():
            name = f"{prefix}::{op.split('.')[1] if '.' in op else op}"  # overloads count as one, as there
            merged[name] = merged.get(name, 0) + n
        yield from merged.items()


def _metric(name: str, series: Series, write: Callable[[float], str]) -> list[str]:
    samples = list(series.samples)
    values = sorted(value for _, value in samples)
    lines = [f"Metric: {name}", f"  TotalSamples: {series.count}", f"  Accumulator: {write(series.total)}"]
    span = samples[-1][0] - samples[0][0]
    if span > 0:
        lines.append(f"  ValueRate: {write(sum(values) / span)} / second")
        lines.append(f"  Rate: {len(values) / span:.6g} / second")
    at = [f"{p}%={write(values[p * len(values) // 100])}" for p in PERCENTILES]
    lines.append(f"  Percentiles: {'; '.join(at)}")
    return lines


def time_text(seconds: float) -> str:
    """Return ``02m18s034ms012.345us``: from the largest unit that is needed down to microseconds."""
    text = ""
    microseconds = round(seconds * 1e6, 3)
    for unit, size, width in (("d", 86400e6, 2), ("h", 3600e6, 2), ("m", 60e6, 2), ("s", 1e6, 2), ("ms", 1e3, 3)):
        whole = math.floor(microseconds / size)
        if whole or text:
            text += f"{whole:0{width}d}{unit}"
            microseconds -= whole * size
    return f"{text}{microseconds:07.3f}us"


def size_text(size: float) -> str:
    """Return ``1.23MB``, in powers of 1024."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if size < 1024:
            return f"{size:.2f}{unit}"
        size /= 1024
    return f"{size:.2f}PB"
