"""Collect what the page shows, as plain data: an overview of the run, and one part for each graph."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from lazytpu.debug.device_times import CALLS, DeviceTimes
from lazytpu.debug.folder import Dump, DumpedGraph, JsonObject
from lazytpu.debug.links import MAX_OPS, without_location
from lazytpu.debug.slow.costly_lines import MEASURED, MOST
from lazytpu.ir.site import Site

_METADATA = re.compile(r", (?:metadata|backend_config|frontend_attributes)=\{")
# Beyond this a page gets slow to open; the files of the dump have the rest.
MAX_STEPS = 20_000


def overview(dump: Dump, times: Mapping[str, DeviceTimes], parts: Sequence[JsonObject] = ()) -> JsonObject:
    """Return what is shown of the run: versions, steps, graphs, cuts, fallbacks, sources, and why a step is slow.

    Args:
        times: of a profile of the run.
        parts: `graph_part` of its graphs.
    """
    about = dump.manifest
    runs = {row["number"]: row for row in dump.summary.get("graphs", ())}
    return {
        "platform": about.get("platform", ""),
        "device": about.get("device", ""),
        "versions": about.get("versions", {}),
        "steps": dump.steps[-MAX_STEPS:],
        "steps_left_out": max(0, len(dump.steps) - MAX_STEPS),
        "summary": {kind: dump.summary.get(kind, []) for kind in ("cuts", "reads", "fallbacks")},
        "slow": _slow(dump, times, parts),
        "sources": dump.sources(),
        "graphs": [_head(dump, graph, runs, times) for graph in dump.graphs],
    }


def _slow(dump: Dump, times: Mapping[str, DeviceTimes], parts: Sequence[JsonObject]) -> JsonObject:
    """Return the account of a step, with the lines that a profile has measured where the run itself had none."""
    slow: JsonObject = dump.summary.get("slow", {})
    if not slow or any(lines["how"] == MEASURED for lines in slow["lines"]):
        return slow
    spent: dict[str, dict[str, float]] = {}
    for graph, part in zip(dump.graphs, parts, strict=False):
        runs = times[graph.manifest["hlo_module"]].runs if graph.manifest["hlo_module"] in times else 0
        for op in part["ops"]:
            if op["file"] and op["seconds"] and runs:
                ops = spent.setdefault(Site(op["file"], op["line"], op["module"]).describe(), {})
                ops[op["op"]] = ops.get(op["op"], 0.0) + runs * op["seconds"]
    if not spent:
        return slow
    seconds = {line: sum(ops.values()) for line, ops in spent.items()}
    places = sorted(seconds, key=lambda line: -seconds[line])[:MOST]
    total = sum(seconds.values())
    rows = [[line, seconds[line] / total, sorted(spent[line], key=lambda op: -spent[line][op])[:3]] for line in places]
    return {**slow, "lines": [*slow["lines"], {"how": MEASURED, "rows": rows}]}


def _head(
    dump: Dump, graph: DumpedGraph, runs: Mapping[int, JsonObject], times: Mapping[str, DeviceTimes]
) -> JsonObject:
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
        "mesh": graph.table("cost.json").get("mesh"),
    }


def graph_part(graph: DumpedGraph, times: DeviceTimes | None) -> JsonObject:
    """Return what is shown of one graph: ops, the three texts with the ops of each line, instructions, the diff."""
    table, links = graph.table("graph.json"), graph.table("links.json")
    optimized = links.get("hlo-optimized.txt", {})
    rows: list[JsonObject] = optimized.get("instructions", [])
    owners = _owners(rows, optimized.get("computations", ()))
    ops: list[JsonObject] = table.get("ops", [])
    by_op = op_seconds(ops, rows, owners, times) if times is not None and times.runs else {}
    for index, op in enumerate(ops):
        op["results"] = [[r["name"], r["type"]] for r in op["results"]]
        op["seconds"] = by_op.get(index)
    ops_of_line = {row["line"]: row["ops"] for row in rows}
    return {
        "ops": ops,
        "inputs": table.get("inputs", []),
        "numbers": table.get("numbers", []),
        "stacks": table.get("stacks", []),
        "outputs": table.get("outputs", []),
        "texts": {
            "ir": _pane(graph.text("ir.txt"), links.get("ir.txt", [])),
            "stablehlo": _pane(graph.text("stablehlo.mlir"), links.get("stablehlo.mlir", []), without_location),
            "hlo": _hlo_pane(graph.text("hlo-optimized.txt"), ops_of_line),
        },
        "instructions": [
            [row["line"], row["name"], row["opcode"], owners.get(row["line"], 0), row["how"]] for row in rows
        ],
        "folded": folded(ops, rows) if rows else {},
        "diff": graph.text("diff.txt").splitlines(),
    }


def folded(ops: Sequence[JsonObject], rows: Sequence[JsonObject]) -> dict[int, list[int]]:
    """Map each op that XLA made no instruction of to the nearest ops that use it and have some."""
    left = {op for row in rows for op in row["ops"]}
    users: dict[str, list[int]] = {}
    for index, op in enumerate(ops):
        for name in op["operands"]:
            users.setdefault(name, []).append(index)
    found: dict[int, list[int]] = {}
    for index in reversed(range(len(ops))):  # what uses an op comes after it
        if index not in left:
            after = dict.fromkeys(user for result in ops[index]["results"] for user in users.get(result[0], ()))
            into = [op for user in after for op in ([user] if user in left else found[user])]
            found[index] = list(dict.fromkeys(into))[:MAX_OPS]
    return found


def _pane(text: str, ops: list[list[int]], shown: Callable[[str], str] = str) -> JsonObject:
    """Return the lines to show, with their number in the file and their ops."""
    kept = [(i, line) for i, line in enumerate(text.splitlines(), 1) if not line.startswith("#loc")]
    return {
        "lines": [shown(line) for _, line in kept],
        "numbers": [i for i, _ in kept],
        "ops": [ops[i - 1] if i <= len(ops) else [] for i, _ in kept],
    }


def _hlo_pane(text: str, ops: Mapping[int, list[int]]) -> JsonObject:
    """Return HLO without the tables of lines at its head and without metadata, which the links say better."""
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.endswith("{") and not line.startswith("HloModule")), 0)
    kept = [(i, line) for i, line in enumerate(lines, 1) if i > start or i == 1]
    return {
        "lines": [_METADATA.split(line)[0] if line.startswith(" ") else line for _, line in kept],
        "numbers": [i for i, _ in kept],
        "ops": [ops.get(i, []) for i, _ in kept],
    }


def _owners(rows: Sequence[JsonObject], computations: Sequence[JsonObject]) -> dict[int, int]:
    """Map the line of an instruction inside a fusion to the line of the outermost fusion."""
    by_line = {row["line"]: row for row in rows}
    called_by = {c["name"]: c["called_by"] for c in computations}
    found: dict[int, int] = {}
    for line, row in by_line.items():
        above = called_by.get(row["computation"], [])
        while above and by_line[above[0]]["opcode"] == "fusion":
            found[line] = above[0]
            above = called_by.get(by_line[above[0]]["computation"], [])
    return found


def op_seconds(
    ops: Sequence[JsonObject], rows: Sequence[JsonObject], owners: Mapping[int, int], times: DeviceTimes
) -> dict[int, float]:
    """Map each op to its seconds in one run: those of a fusion are divided among its ops by their FLOPs."""
    fused: dict[int, set[int]] = {}
    for row in rows:
        if row["line"] in owners:
            fused.setdefault(owners[row["line"]], set()).update(row["ops"])
    found: dict[int, float] = {}
    for row in rows:
        spent = times.seconds.get(row["name"])
        if spent is None or row["opcode"] in CALLS or row["line"] in owners:
            continue
        weights = {op: 1 + ops[op]["flops"] for op in fused.get(row["line"]) or row["ops"]}
        for op, weight in weights.items():
            found[op] = found.get(op, 0.0) + spent / times.runs * weight / sum(weights.values())
    return found
