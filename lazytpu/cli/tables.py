"""Print the tables of a dump, for a terminal of any width."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.syntax import Syntax

from lazytpu.debug.folder import Dump, DumpedGraph, JsonObject
from lazytpu.debug.passes import START, Pass
from lazytpu.observe.metrics_tables import Step, amount, size, steps_table, table

_LANGUAGES = {
    ".json": "json",
    ".jsonl": "json",
    ".diff": "diff",
    ".mlir": "llvm",
    ".py": "python",
    ".svg": "xml",
    ".txt": "llvm",
}


def console() -> Console:
    """Return where to print; wide enough for all columns where it is no terminal."""
    made = Console(highlight=False)
    return made if made.is_terminal else Console(highlight=False, width=120)


def show_dump(dump: Dump) -> None:
    """Print the list of graphs, and what forced cuts."""
    out = console()
    about = dump.manifest
    versions = ", ".join(f"{name} {version}" for name, version in about.get("versions", {}).items())
    out.print(f"[bold]{dump.folder}[/]  {len(dump.graphs)} graphs on {about.get('device', '?')}, {versions}")
    rows = []
    for graph in dump.graphs:
        m, timed = graph.manifest, dump.compiles.get(graph.name, {})
        seconds = f"{timed['lower_s'] + timed['compile_s']:.2f}" if timed else "-"
        why = f"{m['cause']['text']}\n[dim]at {m['cause']['at']}[/]"
        counts = [str(m["ops"]), amount(m.get("flops", 0)), size(m.get("bytes", 0)), seconds]
        rows.append([str(m["number"]), why, *counts])
    out.print(table(["graph", "compiled because", "ops", "FLOPs", "bytes", "compile s"], rows, left=2))
    _show_tallies(out, dump)


def _show_tallies(out: Console, dump: Dump) -> None:
    names = {"cuts": "forced cuts", "fallbacks": "ops that ran on the CPU"}
    for kind, title in names.items():
        rows = [
            [row["what"], row["line"], str(row["count"]), f"{1e3 * row['seconds']:.1f}"]
            for row in dump.summary.get(kind, ())
        ]
        if rows:
            out.print(table([title, "line", "count", "ms"], rows, left=2))


def show_graph(dump: Dump, graph: DumpedGraph, top: int) -> None:
    """Print one graph: why it was compiled, its costs, its memory and its missing files."""
    out = console()
    m = graph.manifest
    out.print(f"[bold]{graph.name}[/]  {m['ops']} ops, {m['inputs']} inputs, {m['outputs']} outputs")
    out.print(graph.text("cause.txt").rstrip(), markup=False)
    cost = graph.table("cost.json")
    heads = ["count", "FLOPs", "%", "bytes"]
    for key, head in (("by_op", "op"), ("by_module", "module")):
        rows = [_cost_row(row[head] or "(no module)", row, cost["flops"]) for row in cost.get(key, ())[:top]]
        more = len(cost.get(key, ())) - len(rows)
        out.print(table([f"{head}{f' ({more} more)' if more > 0 else ''}", *heads], rows))
    ops = sorted(graph.table("graph.json").get("ops", ()), key=lambda op: -op["flops"])[:top]
    rows = [
        [f"{op['name']} {op['op']}", _place(op), amount(op["flops"]), _share(op["flops"], cost.get("flops", 0)),
         size(op["bytes"])] for op in ops if op["flops"]
    ]  # fmt: skip
    out.print(table(["most expensive ops", "line and module", "FLOPs", "%", "bytes"], rows, left=2))
    memory = graph.table("memory.json")
    rows = [[name.removesuffix("_bytes"), size(n)] for name, n in memory.items() if name.endswith("_bytes")]
    out.print(table(["memory", "bytes"], rows))
    if "xla" in cost and cost["xla"]:
        out.print(f"XLA's count: {amount(cost['xla'].get('flops', 0))} FLOPs (the body of a loop once)")
    for file, reason in m.get("missing", {}).items():
        out.print(f"[dim]no {file}: {reason}[/]")


def _cost_row(name: str, row: JsonObject, total: int) -> list[str]:
    return [name, str(row["count"]), amount(row["flops"]), _share(row["flops"], total), size(row["bytes"])]


def _share(part: float, total: float) -> str:
    return f"{100 * part / total:.1f}" if total else "-"


def _place(op: JsonObject) -> str:
    words = [f"{Path(op['file']).name}:{op['line']}" if op["file"] else "?", op["module"]]
    return "  ".join(filter(None, words)) + (" (backward)" if op["backward"] else "")


def show_diff(old: DumpedGraph, new: DumpedGraph, text: str) -> None:
    """Print how two graphs differ: totals, ops and the text."""
    out = console()
    rows = []
    for field in ("ops", "inputs", "outputs", "flops", "bytes"):
        a, b = old.manifest.get(field, 0), new.manifest.get(field, 0)
        rows.append([field, amount(a), amount(b), f"{'+' if b >= a else '-'}{amount(abs(b - a))}"])
    counts = [{row["op"]: row["count"] for row in g.table("cost.json").get("by_op", ())} for g in (old, new)]
    for op in sorted(counts[0].keys() | counts[1].keys()):
        a, b = (c.get(op, 0) for c in counts)
        if a != b:
            rows.append([op, str(a), str(b), f"{b - a:+}"])
    out.print(table(["", f"graph {old.number}", f"graph {new.number}", "difference"], rows))
    if text:
        out.print(Syntax(text, "diff", background_color="default", word_wrap=True))
    else:
        out.print("the ops are the same")


def show_passes(graph: DumpedGraph, found: Sequence[Pass]) -> None:
    """Print the passes that changed a program."""
    shown = [p for i, p in enumerate(found) if i == 0 or p.name != START]
    rows = [[p.name, p.pipeline, str(p.before), str(p.after), f"{p.after - p.before:+}"] for p in shown]
    heads = ["pass", "pipeline", "before", "after", "change"]
    console().print(table(heads, rows, f"{graph.name}: instructions of HLO", left=2))


def show_steps(path: Path, steps: Sequence[Step]) -> None:
    """Print what the steps in a file cost."""
    out = console()
    out.print(f"[bold]{path}[/]  {len(steps)} step{'s' * (len(steps) != 1)}")
    out.print(steps_table(steps))


def show_file(path: Path) -> None:
    """Print a file with colors."""
    language = "diff" if path.name == "diff.txt" else _LANGUAGES.get(path.suffix, "")
    try:
        text = path.read_text()
    except UnicodeDecodeError:
        console().print(f"{path} is not text")
        return
    out = console()
    if out.is_terminal:
        out.print(Syntax(text, language, background_color="default", word_wrap=False))
    else:
        print(text, end="")
