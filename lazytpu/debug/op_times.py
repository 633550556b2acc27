"""Join the device events of a trace with the aten ops they come from: times by op, names in Perfetto."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lazytpu.debug.device_times import CALLS, device_times, latest_trace, read_trace
from lazytpu.debug.graph_text import optimized_hlo_of
from lazytpu.debug.hlo import Instruction, parse
from lazytpu.debug.links import Names, origins
from lazytpu.diagnosis import events
from lazytpu.ir.graph import Graph
from lazytpu.ir.tree import Node
from lazytpu.observers import Observer, add

measured: list[tuple[Node | None, float]] = []
"""What the device took for ops in the last profile, in seconds; for None, what XLA did by itself."""

UNKNOWN = "(XLA)"
"""The name of what XLA does by itself, such as copies."""


@dataclass(frozen=True, slots=True)
class OpTime:
    """The time of one op of one module.

    Attributes:
        op, module: the aten op and the path of the module it was called in.
        site: the user's line, of the first where there are several.
        seconds: in one run.
        instructions: how many of XLA's instructions are named after it.
        fused: names of the other ops that are computed in the same instructions.
    """

    op: str
    module: str
    site: str
    seconds: float
    instructions: int
    fused: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OpTimes:
    """Times of the ops of a step, the longest first; prints as a table.

    Attributes:
        rows: the ops.
        runs: how many calls were measured.
    """

    rows: tuple[OpTime, ...]
    runs: int

    @property
    def total_s(self) -> float:
        """Return the time of all ops in one run; instructions that run in parallel count each."""
        return sum(row.seconds for row in self.rows)

    def __str__(self) -> str:
        table = Table(box=None, pad_edge=False, header_style="")
        for name in ("ms", "%"):
            table.add_column(name, justify="right")
        for name in ("op", "module", "line", "fused with"):
            table.add_column(name)
        total = self.total_s or 1.0
        for row in self.rows:
            numbers = f"{1e3 * row.seconds:.3f}", f"{100 * row.seconds / total:.1f}"
            table.add_row(*numbers, row.op, row.module, row.site, ", ".join(row.fused))
        table.add_row(f"{1e3 * self.total_s:.3f}", "100.0" if self.rows else "", f"total, mean of {self.runs} runs")
        out = StringIO()
        Console(file=out, width=1000, highlight=False, no_color=True, markup=False).print(table)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())

    __repr__ = __str__


@dataclass(frozen=True, slots=True)
class _Source:
    """Where an instruction comes from.

    Attributes:
        node: the op it is named after, None where nothing is known.
        others: the other ops inside it.
        calls: its time contains that of other instructions.
    """

    node: Node | None
    others: tuple[Node, ...]
    calls: bool


_NOTHING = _Source(None, (), False)


def _sources() -> dict[str, dict[str, _Source]]:
    """Map each module (``jit_lazytpu_<hash>``) to its instructions, for the graphs in memory."""
    found: dict[str, dict[str, _Source]] = {}
    for event in events.compilations:
        if event.executable is not None:
            text = optimized_hlo_of(event.executable.compiled)
            found[f"jit_lazytpu_{event.graph.key[:8]}"] = dict(_instructions(text, event.graph))
    return found


def _instructions(text: str, graph: Graph) -> Iterator[tuple[str, _Source]]:
    module = parse(text)
    origin = origins(module, Names(graph))

    def ops_inside(instruction: Instruction) -> Iterator[int]:
        yield from origin[instruction.line].ops[:1]
        for name in instruction.called if instruction.opcode == "fusion" else ():
            for inner in module.computations[name].instructions if name in module.computations else ():
                if inner.opcode not in ("parameter", "constant") and origin[inner.line].how == "metadata":
                    yield from ops_inside(inner)

    for _, instruction in module.instructions():
        nodes = [graph.nodes[index] for index in dict.fromkeys(ops_inside(instruction))]
        first = nodes[0] if nodes else None
        yield instruction.name, _Source(first, tuple(nodes[1:]), instruction.opcode in CALLS)


def times_of(folder: Path, runs: int) -> OpTimes:
    """Return the times by op in the latest trace of a folder.

    Args:
        runs: how many times the step ran in it.
    """
    sources = _sources()
    seconds: dict[tuple[str, str], float] = {}
    counts: Counter[tuple[str, str]] = Counter()
    sites: dict[tuple[str, str], str] = {}
    fused: dict[tuple[str, str], dict[str, None]] = {}
    for module, times in device_times(folder).items():
        for name, spent in times.seconds.items():
            source = sources.get(module, {}).get(name, _NOTHING)
            if source.calls:
                continue
            key = _key(source.node)
            seconds[key] = seconds.get(key, 0.0) + spent / runs
            counts[key] += 1
            sites.setdefault(key, str(source.node.site) if source.node is not None and source.node.site.file else "")
            fused.setdefault(key, {}).update(dict.fromkeys(_key(node)[0] for node in source.others))
    rows = [
        OpTime(*key, sites[key], spent, counts[key], tuple(op for op in fused[key] if op != key[0]))
        for key, spent in sorted(seconds.items(), key=lambda item: -item[1])
    ]
    return OpTimes(tuple(rows), runs)


def _key(node: Node | None) -> tuple[str, str]:
    if node is None:
        return UNKNOWN, ""
    return str(node.op.name), node.site.module


def name_device_events(folder: Path) -> None:
    """Add the op, module and line to the device's events, in the latest trace of a folder for Perfetto.

    What each op took is kept in `measured`.
    """
    path = latest_trace(folder)
    if path is None:
        return
    sources, content = _sources(), read_trace(path)
    measured.clear()
    for event in content.get("traceEvents", ()):
        about = event.get("args", {})
        module = str(about.get("hlo_module", "")).partition("(")[0]
        source = sources.get(module, {}).get(about.get("hlo_op", ""), _NOTHING)
        about |= _shown(source)
        if event.get("ph") == "X" and "hlo_op" in about and not source.calls:
            measured.append((source.node, 1e-6 * event.get("dur", 0.0)))
    path.write_bytes(gzip.compress(json.dumps(content).encode()))


class _Reset(Observer):
    """Lets `lazytpu.metrics.reset` forget what was measured."""

    def metrics_reset(self) -> None:
        measured.clear()


add(_Reset())


def _shown(source: _Source) -> dict[str, str]:
    """Return what a trace shows of an instruction."""
    if source.node is None:
        return {}
    op, module = _key(source.node)
    line = source.node.site.text
    others = ", ".join(dict.fromkeys(str(node.op.name) for node in source.others))
    shown = {"aten": op, "module": module, "line": line, "fused_with": others}
    return {name: text for name, text in shown.items() if text}
