"""What the page shows, as plain data: an overview of the run, and one part for each graph."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from lazytpu.debug.folder import Dump, DumpedGraph
from lazytpu.debug.links import MAX_OPS, without_location
from lazytpu.debug.report.measured import CALLS, Measured
from lazytpu.debug.report.readers import readers

Table = dict[str, Any]
_METADATA = re.compile(r", (?:metadata|backend_config|frontend_attributes)=\{")
# Beyond this a page gets slow to open; the files of the dump have the rest.
MAX_STEPS = 20_000


def overview(dump: Dump, times: dict[str, Measured]) -> Table:
    """The run: versions, steps, graphs, cuts, fallbacks, sources."""
    about = dump.manifest
    runs = {row["number"]: row for row in dump.summary.get("graphs", ())}
    return {
        "platform": about.get("platform", ""),
        "device": about.get("device", ""),
        "versions": about.get("versions", {}),
        "steps": dump.steps[-MAX_STEPS:],
        "steps_left_out": max(0, len(dump.steps) - MAX_STEPS),
        "summary": {kind: dump.summary.get(kind, []) for kind in ("cuts", "reads", "fallbacks")},
        "sources": dump.sources(),
        "graphs": [_head(dump, graph, runs, times) for graph in dump.graphs],
    }


def _head(dump: Dump, graph: DumpedGraph, runs: dict[int, Table], times: dict[str, Measured]) -> Table:
    about, timed = graph.manifest, dump.compiles.get(graph.name, {})
    keys = ("name", "number", "ops", "inputs", "outputs", "flops", "bytes", "nearest", "cause", "missing")
    found = times.get(about["hlo_module"])
    return {
        **{key: about.get(key) for key in keys},
        "at_s": timed.get("at_s"),
        "lower_s": timed.get("lower_s"),
        "compile_s": timed.get("compile_s"),
        "runs": runs.get(about["number"], {}).get("runs"),
        "run_s": runs.get(about["number"], {}).get("run_s") or None,
        "profiled": found.runs if found else 0,
        "memory": graph.table("memory.json"),
        "xla": graph.table("cost.json").get("xla", {}),
    }


def graph_part(graph: DumpedGraph, times: Measured | None, sources: Mapping[str, str]) -> Table:
    """One graph: ops, the three texts with the ops of each line, instructions, the diff.

    Args:
        sources: path of each file of the program to its text.
    """
    table, links = graph.table("graph.json"), graph.table("links.json")
    rows = links.get("hlo-optimized.txt", {}).get("instructions", [])
    owners = _owners(links.get("hlo-optimized.txt", {}))
    seconds = _instruction_seconds(rows, times)
    by_op = op_seconds(rows, owners, seconds)
    ops = table.get("ops", [])
    for position, op in enumerate(ops):
        op["results"] = [[r["name"], r["type"]] for r in op["results"]]
        op["seconds"] = by_op.get(position) if times else None
    ops_of_line = {row["line"]: row["ops"] for row in rows}
    return {
        "ops": ops,
        "inputs": table.get("inputs", []),
        "numbers": table.get("numbers", []),
        "stacks": table.get("stacks", []),
        "outputs": table.get("outputs", []),
        "texts": {
            "ir": _pane(graph.text("ir.txt"), links.get("ir.txt", []), lambda line: line),
            "stablehlo": _pane(graph.text("stablehlo.mlir"), links.get("stablehlo.mlir", []), without_location),
            "hlo": _hlo_pane(graph.text("hlo-optimized.txt"), ops_of_line),
        },
        "instructions": [
            [row["line"], row["name"], row["opcode"], owners.get(row["line"], 0), row["flops"], row["bytes"],
             row["times"], seconds.get(row["name"]), row["how"]]
            for row in rows
        ],
        "readers": {file: readers(text, file, ops) for file, text in sources.items()},
        "folded": folded(ops, rows) if rows else {},
        "diff": graph.text("diff.txt").splitlines(),
    }  # fmt: skip


def folded(ops: list[Table], rows: list[Table]) -> dict[int, list[int]]:
    """Position of an op that XLA made no instruction of, to those of the nearest ops that use it and have some."""
    left = {op for row in rows for op in row["ops"]}
    users: dict[str, list[int]] = {}
    for position, op in enumerate(ops):
        for name in op["operands"]:
            users.setdefault(name, []).append(position)
    found: dict[int, list[int]] = {}
    for position in reversed(range(len(ops))):  # what uses an op comes after it
        if position not in left:
            after = dict.fromkeys(user for result in ops[position]["results"] for user in users.get(result[0], ()))
            into = [op for user in after for op in ([user] if user in left else found[user])]
            found[position] = list(dict.fromkeys(into))[:MAX_OPS]
    return found


def _pane(text: str, ops: list[list[int]], shown: Any) -> Table:
    """Lines to show with their number in the file and their ops."""
    kept = [(i, line) for i, line in enumerate(text.splitlines(), 1) if not line.startswith("#loc")]
    return {
        "lines": [shown(line) for _, line in kept],
        "numbers": [i for i, _ in kept],
        "ops": [ops[i - 1] if i <= len(ops) else [] for i, _ in kept],
    }


def _hlo_pane(text: str, ops: dict[int, list[int]]) -> Table:
    """HLO without the tables of lines at its head and without metadata: the links say it better."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.endswith("{") and not line.startswith("HloModule")), 0)
    kept = [(i, line) for i, line in enumerate(lines, 1) if i > start or i == 1]
    return {
        "lines": [_METADATA.split(line)[0] if line.startswith(" ") else line for _, line in kept],
        "numbers": [i for i, _ in kept],
        "ops": [ops.get(i, []) for i, _ in kept],
    }


def _owners(optimized: Table) -> dict[int, int]:
    """Line of an instruction inside a fusion to the line of the fusion."""
    rows = {row["line"]: row for row in optimized.get("instructions", ())}
    called_by = {c["name"]: c["called_by"] for c in optimized.get("computations", ())}
    found: dict[int, int] = {}
    for line, row in rows.items():
        above = called_by.get(row["computation"], [])
        while above and rows[above[0]]["opcode"] == "fusion":
            found[line] = above[0]
            above = called_by.get(rows[above[0]]["computation"], [])
    return found


def _instruction_seconds(rows: list[Table], times: Measured | None) -> dict[str, float]:
    """Instruction to the seconds of one run of the graph."""
    if times is None or not times.runs:
        return {}
    return {
        row["name"]: times.seconds[row["name"]] / times.runs
        for row in rows
        if row["name"] in times.seconds and row["opcode"] not in CALLS
    }


def op_seconds(rows: list[Table], owners: dict[int, int], seconds: dict[str, float]) -> dict[int, float]:
    """Position of an op to its seconds: those of a fusion are divided among its ops by their operations."""
    weights: dict[int, Counter[int]] = {}
    for row in rows:
        line = owners.get(row["line"])
        if line is not None:
            for op in row["ops"]:
                weights.setdefault(line, Counter())[op] += 1 + row["flops"] // max(len(row["ops"]), 1)
    found: dict[int, float] = {}
    for row in rows:
        spent = seconds.get(row["name"])
        if spent is None or row["line"] in owners:
            continue
        shares = weights.get(row["line"]) or Counter(row["ops"])
        total = shares.total()
        for op, weight in shares.items():
            found[op] = found.get(op, 0.0) + spent * weight / total
    return found
