"""From the events of a trace back to aten ops: measured times by op, and names for Perfetto."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from lazytpu.debug import xplane
from lazytpu.debug.hlo import Instruction, parse
from lazytpu.debug.inspect import optimized_hlo_of
from lazytpu.debug.links import Names, origins
from lazytpu.debug.report.measured import CALLS, measured
from lazytpu.diagnosis import events
from lazytpu.ir.graph import Graph
from lazytpu.ir.tree import Node

UNKNOWN = "(XLA)"
"""The name for what XLA does by itself, such as copies."""


@dataclass(frozen=True, slots=True)
class OpTime:
    """What an op of one module takes.

    Attributes:
        op, module: the aten op and the path of the module it was called in.
        site: the user's line, of the first where there are several.
        seconds: in one run.
        instructions: how many instructions of XLA's are named after it.
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
    """Times of the ops of a step, the dearest first; prints as a table.

    Attributes:
        rows: the ops.
        runs: how many calls were measured.
    """

    rows: tuple[OpTime, ...]
    runs: int

    @property
    def total_s(self) -> float:
        """The time of all ops in one run; instructions that run side by side count each."""
        return sum(row.seconds for row in self.rows)

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        table = Table(box=None, pad_edge=False, header_style="")
        for name in ("ms", "%"):
            table.add_column(name, justify="right")
        for name in ("op", "module", "line", "fused with"):
            table.add_column(name)
        total = self.total_s or 1.0
        for row in self.rows:
            numbers = f"{1e3 * row.seconds:.3f}", f"{100 * row.seconds / total:.1f}"
            table.add_row(*numbers, row.op, row.module, row.site, ", ".join(row.fused))
        table.add_row(f"{1e3 * self.total_s:.3f}", "100.0" if self.rows else "", f"all, mean of {self.runs} runs")
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


def _sources() -> dict[str, dict[str, _Source]]:
    """Module (``jit_lazytpu_<hash>``) to its instructions, for the graphs that are in memory."""
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
        nodes = [graph.nodes[position] for position in dict.fromkeys(ops_inside(instruction))]
        first = nodes[0] if nodes else None
        yield instruction.name, _Source(first, tuple(nodes[1:]), instruction.opcode in CALLS)


def times_of(folder: Path, runs: int) -> OpTimes:
    """The times of the latest trace in a folder.

    Args:
        runs: how many times the step ran in it.
    """
    sources = _sources()
    seconds: dict[tuple[str, str], float] = {}
    sites: dict[tuple[str, str], str] = {}
    fused: dict[tuple[str, str], dict[str, None]] = {}
    counts: dict[tuple[str, str], int] = {}
    for module, times in measured(folder).items():
        for name, spent in times.seconds.items():
            source = sources.get(module, {}).get(name, _Source(None, (), False))
            if source.calls:
                continue
            key = _key(source.node)
            seconds[key] = seconds.get(key, 0.0) + spent / runs
            counts[key] = counts.get(key, 0) + 1
            sites.setdefault(key, str(source.node.site) if source.node is not None and source.node.site else "")
            fused.setdefault(key, {}).update(dict.fromkeys(_key(node)[0] for node in source.others))
    rows = [
        OpTime(*key, sites[key], spent, counts[key], tuple(op for op in fused[key] if op != key[0]))
        for key, spent in sorted(seconds.items(), key=lambda item: -item[1])
    ]
    return OpTimes(tuple(rows), runs)


def _key(node: Node | None) -> tuple[str, str]:
    if node is None:
        return UNKNOWN, ""
    return str(node.op.name), node.site.module if node.site is not None else ""


def name_device_events(folder: Path) -> None:
    """Adds to the device's events, in the latest trace of a folder, the op, module and line they come from.

    In the file for Perfetto as well as in that for XProf.
    """
    sources = _sources()

    def about(module: str, instruction: str) -> dict[str, str]:
        source = sources.get(module.partition("(")[0], {}).get(instruction)
        return {} if source is None else _told(source)

    written = sorted(folder.rglob("*.trace.json.gz"), key=lambda path: path.stat().st_mtime)[-1:]
    for path in written:
        with gzip.open(path) as file:
            content: dict[str, Any] = json.load(file)
        for event in content.get("traceEvents", ()):
            known = event.get("args", {})
            known.update(about(str(known.get("hlo_module", "")), known.get("hlo_op", "")))
        path.write_bytes(gzip.compress(json.dumps(content).encode()))
        for other in path.parent.glob("*.xplane.pb"):
            other.write_bytes(xplane.with_names(other.read_bytes(), about))


def _told(source: _Source) -> dict[str, str]:
    """What a trace shows of an instruction."""
    if source.node is None:
        return {}
    op, module = _key(source.node)
    line = source.node.site.describe() if source.node.site is not None else ""
    others = ", ".join(dict.fromkeys(str(node.op.name) for node in source.others))
    told = {"aten": op, "module": module, "line": line, "fused_with": others}
    return {name: text for name, text in told.items() if text}
