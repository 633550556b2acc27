"""Apply the environment variables of torch_xla that have an effect here."""

from __future__ import annotations

import os
import warnings

import lazytpu
from lazytpu.compat.torch_xla import metrics_format
from lazytpu.debug.graph_text import optimized_hlo_of
from lazytpu.diagnosis.events import Compilation
from lazytpu.ir.printer import graph_dot, graph_text
from lazytpu.observers import Observer, add
from lazytpu.runtime import platforms

MEANING = {
    "PJRT_DEVICE": "CPU, GPU, CUDA or TPU: where jax runs, unless JAX_PLATFORMS is set; warns where there is none",
    "PT_XLA_DEBUG": "1: log each compilation with its cause, each forced cut and each fallback",
    "PT_XLA_DEBUG_LEVEL": "as PT_XLA_DEBUG",
    "XLA_IR_DEBUG": "no effect: the IR always has the Python lines",
    "XLA_HLO_DEBUG": "no effect: HLO always has the Python lines",
    "XLA_SAVE_TENSORS_FILE": "file to which each compiled graph is appended",
    "XLA_SAVE_TENSORS_FMT": "its format: text, hlo or dot",
    "XLA_SYNC_WAIT": "1: wait at the end of each step",
    "XLA_USE_EAGER_DEBUG_MODE": "1: run each op at once, see lazytpu.config.eager",
    "XLA_METRICS_FILE": "file to which the metrics report is appended after each step",
}
"""Variable to its effect."""

_done: list[bool] = []


def apply() -> None:
    """Apply the variables, once."""
    if _done:
        return
    _done.append(True)
    if is_on("PT_XLA_DEBUG") or is_on("PT_XLA_DEBUG_LEVEL"):
        lazytpu.config.log = "info,cut,fallback"
    if is_on("XLA_USE_EAGER_DEBUG_MODE"):
        lazytpu.config.eager = True
    wanted = os.environ.get("PJRT_DEVICE")
    if wanted and (why := platforms.choose(wanted)):
        warnings.warn(f"PJRT_DEVICE={wanted}, but {why}; the graphs run on {lazytpu.platform()}", stacklevel=2)
    if os.environ.get("XLA_SAVE_TENSORS_FILE"):
        add(_SaveGraphs())


def is_on(name: str) -> bool:
    """Return whether a variable is set to another value than 0."""
    return os.environ.get(name, "0") not in ("", "0")


class _SaveGraphs(Observer):
    """Appends each graph to the file of ``XLA_SAVE_TENSORS_FILE``."""

    def graph_compiled(self, compilation: Compilation) -> None:
        save_graph(compilation)


def save_graph(event: Compilation) -> None:
    """Append a graph to the file of ``XLA_SAVE_TENSORS_FILE``."""
    kind = os.environ.get("XLA_SAVE_TENSORS_FMT", "text")
    if kind == "hlo":
        text = optimized_hlo_of(event.executable.compiled)
    elif kind == "dot":
        text = graph_dot(event.graph)
    elif kind == "text":
        text = graph_text(event.graph)
    else:
        raise ValueError(f"XLA_SAVE_TENSORS_FMT is text, hlo or dot, not {kind!r}")
    with open(os.environ["XLA_SAVE_TENSORS_FILE"], "a") as file:
        file.write(f"[ScheduleSyncTensorsGraph]\nHash: {event.graph.key}\n\n## BEGIN_GRAPH\n{text}\n## END_GRAPH\n\n")


def save_metrics() -> None:
    """Append the report to the file of ``XLA_METRICS_FILE``, if it is set."""
    path = os.environ.get("XLA_METRICS_FILE")
    if path:
        with open(path, "a") as file:
            file.write(f"[MetricsData; step={lazytpu.metrics.counter('step')}]\n{metrics_format.report()}\n")
