"""Writes every compiled graph to a folder: ``lazytpu.config.dump``.

Names and contents are the same in every run of the same program on the same machine, so that two runs can be
compared with ``diff -r``; what differs from run to run (seconds) is in the folder ``times`` alone.
"""

from __future__ import annotations

import atexit
import json
import linecache
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from lazytpu.config import config
from lazytpu.debug import describe, draw, hlo, links
from lazytpu.debug.compare import Text, nearest, text_of, unified
from lazytpu.debug.folder import MANIFEST, read_json
from lazytpu.debug.inspect import hlo_of, optimized_hlo_of, stablehlo_of
from lazytpu.diagnosis import events
from lazytpu.diagnosis.events import Compilation
from lazytpu.ir.printer import graph_dot, graph_text
from lazytpu.observe import logs, metrics
from lazytpu.observers import Observer, add
from lazytpu.runtime import client, compiler

FORMAT = 1
FILES = {
    "ir.txt": "the recorded graph, with the lines of the program",
    "ir.dot": "the recorded graph in Graphviz's language",
    "ir.svg": "the same, drawn",
    "graph.json": "the recorded graph as data: inputs, ops with types, lines, modules and costs, outputs",
    "types.txt": "every value with its type and bytes",
    "sites.txt": "every line of the program with the results of its ops",
    "stablehlo.mlir": "what the ops lower to, with locations",
    "hlo.txt": "HLO before optimisation",
    "hlo-optimized.txt": "HLO after optimisation: what runs",
    "links.json": "lines of the texts, and instructions of the HLO, to the ops they came from",
    "cost.json": "operations and bytes, in sum, by op and by module",
    "memory.json": "bytes of arguments, outputs, temporaries and donated inputs",
    "cause.txt": "why it was compiled",
    "diff.txt": "how it differs from the earlier graph that is most like it",
}


@dataclass
class _Run:
    """What was dumped so far in this process to one folder."""

    folder: Path
    graphs: list[str] = field(default_factory=list)
    texts: list[Text] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)


_run: _Run | None = None


def dump(event: Compilation) -> None:
    """Writes one compiled graph, if a folder is configured.

    The files of graph 1 are in ``graph-001-<hash>``, as `FILES` lists them, with a ``manifest.json`` that says which
    of them are missing and why.  A file that cannot be made never ends the run.
    """
    if config.dump:
        with metrics.timed("dump"):
            _dump(event, _run_in(Path(config.dump)))


def _dump(event: Compilation, run: _Run) -> None:
    name = f"graph-{event.number:03d}-{event.graph.key[:8]}"
    folder = run.folder / name
    folder.mkdir(parents=True, exist_ok=True)
    missing = _Dump(event, name, run, folder).write()
    for file, reason in missing.items():
        if not reason.startswith(_EXPECTED):
            logs.note("compile", "%s of %s was not written: %s", file, name, reason, level=logs.LEVELS["warning"])
    run.graphs.append(name)
    _add_sources(run, event)
    _write_json(run.folder / MANIFEST, _manifest(run))
    timed = {"graph": name, "at_s": time.time()}
    timed |= {"lower_s": event.executable.lower_s, "compile_s": event.executable.compile_s}
    with open(run.folder / "times" / "compiles.jsonl", "a") as file_:
        file_.write(json.dumps(timed) + "\n")


_EXPECTED = ("NoDrawing", "none")


def _run_in(folder: Path) -> _Run:
    global _run
    if _run is None or _run.folder != folder:
        _run = _Run(folder)
        times = folder / "times"
        times.mkdir(parents=True, exist_ok=True)
        for name in ("compiles.jsonl", "steps.jsonl"):
            (times / name).write_text("")
    return _run


@atexit.register
def end() -> None:
    """Writes what is known when the process ends: cuts, reads and fallbacks with their lines, and how graphs ran."""
    if _run is None or not (_run.folder / "times").is_dir():
        return
    tallies = {"cuts": events.cuts, "reads": events.reads, "fallbacks": events.fallbacks}
    table: dict[str, Any] = {
        kind: [
            {"what": what, "line": line, "count": t.count, "seconds": t.seconds}
            for (what, line), t in found.items()
            if line != "?"  # lazytpu's own wait at the end
        ]
        for kind, found in tallies.items()
    }
    table["graphs"] = [{"number": e.number, "runs": e.usage.runs, "run_s": e.usage.run_s} for e in events.compilations]
    _write_json(_run.folder / "times" / "summary.json", table)


def _manifest(run: _Run) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "platform": client.platform(),
        "device": client.device().device_kind,
        "versions": {"torch": torch.__version__, "jax": metadata.version("jax")},
        "sources": run.sources,
        "graphs": run.graphs,
    }


def _add_sources(run: _Run, event: Compilation) -> None:
    """Copies the files of the program that the graph's lines are in, and those that called them."""
    sites = [n.site for n in event.graph.nodes if n.site is not None and n.site.file]
    callers = [file for stack in dict.fromkeys(site.stack for site in sites) for file, _ in stack[1:]]
    for file in dict.fromkeys([*[site.file for site in sites], *filter(describe.is_of_program, callers)]):
        lines = linecache.getlines(file) if file not in run.sources else []
        if lines:
            path = Path(file)
            copy = f"sources/{len(run.sources):02d}-{path.name}"
            (run.folder / "sources").mkdir(exist_ok=True)
            (run.folder / copy).write_text("".join(lines))
            run.sources[file] = copy


class _Dump:
    """Makes the files of one graph; a failure in one leaves the others."""

    def __init__(self, event: Compilation, name: str, run: _Run, folder: Path) -> None:
        self._event, self._name, self._run, self._folder = event, name, run, folder
        self._missing: dict[str, str] = {}
        self._about: dict[str, Any] = {}

    def write(self) -> dict[str, str]:
        """Writes them all; returns the missing ones with the reason."""
        event, graph = self._event, self._event.graph
        ir = self._text("ir.txt", lambda: graph_text(graph))
        dot = self._text("ir.dot", lambda: graph_dot(graph))
        self._text("ir.svg", lambda: draw.svg_of(dot, len(graph.nodes)))
        lowered = compiler.lower(graph)  # again: kept, it would hold a megabyte for every graph
        stablehlo = self._text("stablehlo.mlir", lambda: stablehlo_of(lowered))
        before = self._text("hlo.txt", lambda: hlo_of(lowered))
        after = self._text("hlo-optimized.txt", lambda: optimized_hlo_of(event.executable.compiled))
        self._tables(stablehlo, before, after)
        self._text("types.txt", lambda: describe.types_text(graph))
        self._json("memory.json", lambda: describe.memory_table(graph, event.executable.compiled.memory_analysis()))
        self._text("cause.txt", lambda: cause_text(event))
        self._diff(ir)
        about = self._manifest()
        _write_json(self._folder / MANIFEST, about)
        return self._missing

    def _tables(self, stablehlo: str, before: str, after: str) -> None:
        event, graph = self._event, self._event.graph
        names = links.Names(graph)
        modules = {k: self._parsed(k, text) for k, text in (("hlo.txt", before), ("hlo-optimized.txt", after))}
        found = {k: links.origins(m, names) for k, m in modules.items() if m is not None}
        first = modules["hlo.txt"]
        flops = describe.flops_of(first, names, found["hlo.txt"]) if first else Counter[int]()
        table = self._json("graph.json", lambda: describe.graph_table(graph, flops))
        tables = {k: describe.instruction_table(m, found[k]) for k, m in modules.items() if m is not None}
        self._json(
            "links.json",
            lambda: {
                "ir.txt": links.ir_lines(graph),
                "stablehlo.mlir": links.stablehlo_lines(stablehlo, names),
                **tables,
            },
        )
        xla = event.executable.compiled.cost_analysis() or {}
        optimized = tables.get("hlo-optimized.txt")
        cost = self._json("cost.json", lambda: describe.cost_table(table["ops"], optimized, xla))
        self._text("sites.txt", lambda: describe.sites_text(table["ops"]))
        self._about |= {"flops": cost.get("flops", 0), "bytes": cost.get("bytes", 0)}

    def _parsed(self, file: str, text: str) -> hlo.Module | None:
        return hlo.parse(text) if text else None

    def _diff(self, ir: str) -> None:
        text = text_of(self._name, ir)
        near = nearest(text, self._run.texts)
        self._run.texts.append(text)
        self._about["nearest"] = near.name if near else None
        if near is None:
            self._missing["diff.txt"] = "none of the earlier graphs is like it"
            (self._folder / "diff.txt").unlink(missing_ok=True)
        else:
            self._text("diff.txt", lambda: unified(near, text) or "the ops are the same")

    def _manifest(self) -> dict[str, Any]:
        event, graph = self._event, self._event.graph
        cause = {k: v for k, v in asdict(event.cause).items() if isinstance(v, (str, int))}
        return {
            "format": FORMAT,
            "name": self._name,
            "number": event.number,
            "key": graph.key,
            "hlo_module": f"jit_lazytpu_{graph.key[:8]}",
            "ops": len(graph.nodes),
            "inputs": len(graph.inputs),
            "outputs": len(graph.outputs),
            **self._about,
            "cause": {**cause, "at": event.cause.site.describe(), "was": event.cause.other.describe()},
            "files": {name: what for name, what in FILES.items() if name not in self._missing},
            "missing": self._missing,
        }

    def _text(self, file: str, make: Callable[[], str]) -> str:
        text: str = self._made(file, make, "")
        if file not in self._missing:
            (self._folder / file).write_text(text.rstrip("\n") + "\n")
        return text

    def _json(self, file: str, make: Callable[[], Any]) -> Any:
        made = self._made(file, make, {})
        if file not in self._missing:
            _write_json(self._folder / file, made)
        return made

    def _made(self, file: str, make: Callable[[], Any], otherwise: Any) -> Any:
        try:
            return make()
        except Exception as error:  # the run goes on without the file, and the manifest says so
            self._missing[file] = f"{type(error).__name__}: {error}"
            (self._folder / file).unlink(missing_ok=True)
            return otherwise


def add_to_manifest(folder: Path, files: Mapping[str, str], missing: Mapping[str, str]) -> None:
    """Says in the manifest of a graph that its folder has more files, with what each is, or why it is missing."""
    path = folder / MANIFEST
    if path.is_file():
        about = read_json(path)
        about["files"] |= files
        about["missing"] |= missing
        _write_json(path, about)


def cause_text(event: Compilation) -> str:
    """Why a graph was compiled, without the seconds, which differ from run to run."""
    cause = event.cause
    lines = [f"graph {event.number}, {len(event.graph.nodes)} ops: {events.text_of(cause)}"]
    lines.append(f"at   {cause.site.describe()}")
    if cause.other.file and cause.other != cause.site:
        lines.append(f"was  {cause.other.describe()}")
    return "\n".join(
        lines + [f"{label} {text}" for label, text in (("with", cause.given), ("do  ", cause.remedy)) if text]
    )


def _write_json(path: Path, table: dict[str, Any]) -> None:
    """Writes a JSON object with one record of a list a line, so that files can be compared line by line."""
    parts = [f"{json.dumps(key)}: {_value(value)}" for key, value in table.items()]
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def _value(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], (dict, list)):
        return "[\n" + ",\n".join(json.dumps(v) for v in value) + "\n]"
    if isinstance(value, dict) and any(isinstance(v, (dict, list)) for v in value.values()):
        return "{\n" + ",\n".join(f"{json.dumps(k)}: {_value(v)}" for k, v in value.items()) + "\n}"
    return json.dumps(value, indent=1 if isinstance(value, (dict, list)) else None)


__all__ = ["FILES", "add_to_manifest", "cause_text", "dump"]


class _Dumper(Observer):
    """Writes each graph that is compiled."""

    def graph_compiled(self, compilation: Compilation) -> None:
        dump(compilation)


add(_Dumper())
