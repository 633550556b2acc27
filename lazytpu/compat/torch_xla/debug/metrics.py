"""``torch_xla.debug.metrics``: counters and timers under torch_xla's names."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lazytpu.compat import names
from lazytpu.compat.torch_xla import metrics_format
from lazytpu.compat.torch_xla.core import world
from lazytpu.compat.torch_xla.metrics_format import COUNTERS, METRICS, NUMBERS, SIZES
from lazytpu.observe import metrics

__getattr__ = names.missing_from(__name__)


metrics_report = metrics_format.report


def short_metrics_report(counter_names: Sequence[str] | None = None, metric_names: Sequence[str] | None = None) -> str:
    """Return the report of the named counters and metrics, by default of the most important ones."""
    wanted = {*(counter_names or ()), *(metric_names or ())} or {
        "CachedCompile",
        "MarkStep",
        "UncachedCompile",
        "CompileTime",
        "ExecuteTime",
        "TransferFromDeviceTime",
        "TransferToDeviceTime",
    }
    entries = re.split(r"^(?=Metric: |Counter: )", metrics_report(), flags=re.MULTILINE)
    named = [(entry.partition(": ")[2].partition("\n")[0], entry) for entry in entries if entry]
    return "".join(
        entry for name, entry in named if name in wanted or counter_names is None and name.startswith("aten::")
    )


def counter_names() -> list[str]:
    """Return the names of the counters that are not zero."""
    return re.findall(r"^Counter: (.+)$", metrics_report(), flags=re.MULTILINE)


def counter_value(name: str) -> int | None:
    """Return the value of a counter, None if there is none of that name."""
    if name in COUNTERS:
        return metrics.counter(COUNTERS[name]) or None
    found = re.search(rf"^Counter: {re.escape(name)}\n  Value: (\d+)$", metrics_report(), flags=re.MULTILINE)
    return int(found[1]) if found else None


def metric_names() -> list[str]:
    """Return the names of the metrics that have samples."""
    return re.findall(r"^Metric: (.+)$", metrics_report(), flags=re.MULTILINE)


def metric_data(name: str) -> tuple[int, float, list[tuple[float, float]]] | None:
    """Return the number of samples, their sum, and the latest as (time in seconds, value); None without any.

    Times are in nanoseconds, as in torch_xla, sizes in bytes.  ``InputOutputAliasCount`` has for each graph that was
    compiled the number of inputs that are given to its results.
    """
    if name == "ExecuteReplicatedTime" and world.is_spmd():
        name = "ExecuteTime"  # in SPMD all programs are for all devices
    series: metrics.Series | None
    unit = 1e9 if name in METRICS else 1.0
    if name == "ExecuteTime" and not metrics.timer("run").count:
        series = metrics.timer("dispatch")
    elif name in METRICS:
        series = metrics.timer(METRICS[name])
    else:
        series = NUMBERS.get(name) or metrics.all_sizes().get(SIZES.get(name, ""))
    if series is None or not series.count:
        return None
    return series.count, series.total * unit, [(at, value * unit) for at, value in series.samples]


def clear_counters() -> None:
    """Reset counters and metrics, which are kept together."""
    metrics.reset()


clear_metrics = clear_all = clear_counters


def executed_fallback_ops() -> list[str]:
    """Return the counters of the ops that ran on the CPU, ``aten::...``."""
    return [name for name in counter_names() if name.startswith("aten::")]
