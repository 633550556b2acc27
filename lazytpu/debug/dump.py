"""Write every compiled graph to a folder: ``lazytpu.config.dump``.

Names and contents are the same in every run of a program on the same machine, so that ``diff -r`` compares two runs;
what differs from run to run (seconds) is in the folder ``times`` alone.
"""

from __future__ import annotations

import atexit
import json
import linecache
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TypeVar

import torch

from lazytpu.config import config
from lazytpu.debug import describe, draw, hlo, links, on_mesh
from lazytpu.debug.compare import Text, nearest, text_of, unified
from lazytpu.debug.folder import MANIFEST, JsonObject, digest, read_sealed, sealed
from lazytpu.debug.graph_text import hlo_of, optimized_hlo_of, stablehlo_of
from lazytpu.debug.slow import account
from lazytpu.diagnosis import events
from lazytpu.diagnosis.events import Compilation
from lazytpu.ir.printer import graph_dot, graph_text
from lazytpu.observe import logs, metrics
from lazytpu.observers import Observer, add
from lazytpu.runtime import client, compiler

T = TypeVar("T")
FORMAT = 2
FILES = {
    "ir.txt": "the recorded graph, with the lines of the program",
    "ir.dot": "the recorded graph in Graphviz's language",
    "ir.svg": "the same, drawn",
    "graph.json": "the recorded graph as data: inputs, ops with types, lines, modules and costs, outputs",
    "types.txt": "every value with its type and bytes",
    "sites.txt": "every line of the program with the results of its ops",
    "stablehlo.mlir": "the lowered graph, with locations",
    "hlo.txt": "HLO before optimization",
    "hlo-optimized.txt": "HLO after optimization: what runs",
    "links.json": "lines of the texts, and instructions of the HLO, to the ops they came from",
    "cost.json": "FLOPs and bytes, in all, by op and by module; on a mesh also its collectives",
    "memory.json": "bytes of arguments, outputs, temporaries and donated inputs",
    "cause.txt": "why it was compiled",
    "diff.txt": "how it differs from the most similar earlier graph",
}
_EXPECTED = ("NoDrawing", "none")  # how the reasons begin for which a file may well be missing


@dataclass
class _Run:
    """What this process has dumped to one folder so far."""

    folder: Path
    graphs: list[str] = field(default_factory=list)
    texts: list[Text] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)


_run: _Run | None = None


def dump(event: Compilation) -> None:
    """Write one compiled graph, if a folder is configured.

    The files of graph 1 are in ``graph-001-<hash>``, as `FILES` lists them, with a ``manifest.json`` that says which
    of them are missing and why.  A file that cannot be made never ends the run, nor does a disk that is full: a process
    that is killed or cannot write leaves a dump of the graphs before.

    Raises:
        OSError: the folder cannot be made.
    """
    if config.dump:
        with metrics.timed("dump"):
            run = _run_in(Path(config.dump))
            try:
                _dump(event, run)
            except OSError as error:
                _warn("graph %d was not dumped: %s", event.number, error)


def _warn(text: str, *values: object) -> None:
    logs.note("compile", text, *values, level=logs.LEVELS["warning"])


def _dump(event: Compilation, run: _Run) -> None:
    made = _GraphFolder(event, run)
    made.write()
    for file, reason in made.missing.items():
        if not reason.startswith(_EXPECTED):
            _warn("%s of %s was not written: %s", file, made.name, reason)
    _add_sources(run, event)
    run.graphs.append(made.name)
    _write_sealed(run.folder / MANIFEST, _manifest(run))
    timed = {"graph": made.name, "at_s": time.time()}
    timed |= {"lower_s": event.executable.lower_s, "compile_s": event.executable.compile_s}
    with open(run.folder / "times" / "compiles.jsonl", "a") as file_:
        file_.write(json.dumps(timed) + "\n")


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
    """Write what is known at the end of the process: cuts, reads and fallbacks with their lines, runs of graphs."""
    if _run is None or not (_run.folder / "times").is_dir():
        return
    tallies = {"cuts": events.cuts, "reads": events.reads, "fallbacks": events.fallbacks}
    table: JsonObject = {
        kind: [
            {"what": what, "line": line, "count": t.count, "seconds": t.seconds}
            for (what, line), t in found.items()
            if line != "?"  # lazytpu's own wait at the end
        ]
        for kind, found in tallies.items()
    }
    table["slow"] = account.table()
    table["graphs"] = [{"number": e.number, "runs": e.usage.runs, "run_s": e.usage.run_s} for e in events.compilations]
    try:
        _write_sealed(_run.folder / "times" / "summary.json", table)
    except OSError as error:
        _warn("summary.json was not written: %s", error)


def _manifest(run: _Run) -> JsonObject:
    return {
        "format": FORMAT,
        "platform": client.platform(),
        "device": client.device().device_kind,
        "versions": {"torch": torch.__version__, "jax": metadata.version("jax")},
        "sources": run.sources,
        "sha256": run.digests,
        "graphs": run.graphs,
    }


def _add_sources(run: _Run, event: Compilation) -> None:
    """Copy the files of the program that the graph's lines are in, and those that called them."""
    sites = [n.site for n in event.graph.nodes if n.site.file]
    callers = [file for stack in dict.fromkeys(site.stack for site in sites) for file, _ in stack[1:]]
    for file in dict.fromkeys([*[site.file for site in sites], *filter(describe.is_of_program, callers)]):
        lines = linecache.getlines(file) if file not in run.sources else []
        if lines:
            copy = f"sources/{len(run.sources):02d}-{Path(file).name}"
            (run.folder / "sources").mkdir(exist_ok=True)
            run.digests[copy] = _write(run.folder / copy, "".join(lines))
            run.sources[file] = copy


class _GraphFolder:
    """Writes the files of one graph; a failure in one leaves the others.

    Attributes:
        name: of the folder.
        missing: files that were not written, with the reason.
        digests: of those that were.
    """

    def __init__(self, event: Compilation, run: _Run) -> None:
        self._event, self._run = event, run
        self.name = f"graph-{event.number:03d}-{event.graph.key[:8]}"
        self.missing: dict[str, str] = {}
        self.digests: dict[str, str] = {}
        self._folder = run.folder / self.name
        self._about: JsonObject = {}

    def write(self) -> None:
        """Write them all."""
        self._folder.mkdir(parents=True, exist_ok=True)
        event, graph = self._event, self._event.graph
        ir = self._text("ir.txt", lambda: graph_text(graph))
        dot = self._text("ir.dot", lambda: graph_dot(graph))
        self._text("ir.svg", lambda: draw.svg_of(dot, len(graph.nodes)))
        lowered = compiler.lower(graph)  # again: kept, it would hold a megabyte for every graph
        stablehlo = self._text("stablehlo.mlir", lambda: stablehlo_of(lowered))
        before = self._text("hlo.txt", lambda: hlo_of(lowered))
        after = self._text("hlo-optimized.txt", lambda: optimized_hlo_of(event.executable.compiled))
        self._links(stablehlo, {"hlo.txt": before, "hlo-optimized.txt": after})
        ops = self._json("graph.json", lambda: describe.graph_table(graph)).get("ops", [])
        xla = event.executable.compiled.cost_analysis() or {}
        mesh = self._mesh(after)
        cost = self._json("cost.json", lambda: {**describe.cost_table(ops, xla), **mesh})
        self._about |= {"flops": cost.get("flops", 0), "bytes": cost.get("bytes", 0)}
        self._text("sites.txt", lambda: describe.sites_text(ops))
        self._text("types.txt", lambda: describe.types_text(graph))
        self._json("memory.json", lambda: describe.memory_table(graph, event.executable.compiled.memory_analysis()))
        self._text("cause.txt", lambda: cause_text(event))
        self._diff(ir)
        _write_sealed(self._folder / MANIFEST, self._manifest())

    def _links(self, stablehlo: str, texts: Mapping[str, str]) -> None:
        graph = self._event.graph

        def table() -> JsonObject:
            names = links.Names(graph)
            made: JsonObject = {"ir.txt": links.ir_lines(graph)}
            made["stablehlo.mlir"] = links.stablehlo_lines(stablehlo, names)
            for file, module in [(file, hlo.parse(text)) for file, text in texts.items() if text]:
                made[file] = describe.instruction_table(module, links.origins(module, names))
            return made

        self._json("links.json", table)

    def _mesh(self, optimized: str) -> JsonObject:
        found = on_mesh.mesh_table(self._event.graph, optimized) if optimized else {}
        return {"mesh": found} if found else {}

    def _diff(self, ir: str) -> None:
        text = text_of(self.name, ir)
        near = nearest(text, self._run.texts)
        self._run.texts.append(text)
        self._about["nearest"] = near.name if near else None
        if near is None:
            self.missing["diff.txt"] = "none of the earlier graphs is similar"
            (self._folder / "diff.txt").unlink(missing_ok=True)
        else:
            self._text("diff.txt", lambda: unified(near, text) or "the ops are the same")

    def _manifest(self) -> JsonObject:
        event, graph, cause = self._event, self._event.graph, self._event.cause
        return {
            "format": FORMAT,
            "name": self.name,
            "number": event.number,
            "key": graph.key,
            "hlo_module": f"jit_lazytpu_{graph.key[:8]}",
            "ops": len(graph.nodes),
            "inputs": len(graph.inputs),
            "outputs": len(graph.outputs),
            **self._about,
            "cause": {
                "kind": cause.kind,
                "text": cause.text,
                "known": cause.known,
                "at": cause.site.describe(),
                "was": cause.other.describe(),
                "with": cause.given,
                "fix": cause.fix,
            },
            "files": {name: what for name, what in FILES.items() if name not in self.missing},
            "missing": self.missing,
            "sha256": self.digests,
        }

    def _text(self, file: str, make: Callable[[], str]) -> str:
        text = self._made(file, make, "")
        if file not in self.missing:
            self.digests[file] = _write(self._folder / file, text.rstrip("\n") + "\n")
        return text

    def _json(self, file: str, make: Callable[[], JsonObject]) -> JsonObject:
        nothing: JsonObject = {}
        made = self._made(file, make, nothing)
        if file not in self.missing:
            self.digests[file] = _write(self._folder / file, _json_text(made))
        return made

    def _made(self, file: str, make: Callable[[], T], otherwise: T) -> T:
        try:
            return make()
        except Exception as error:  # the run goes on without the file, and the manifest says so
            self.missing[file] = f"{type(error).__name__}: {error}"
            (self._folder / file).unlink(missing_ok=True)
            return otherwise


def add_to_manifest(folder: Path, files: Mapping[str, str], missing: Mapping[str, str]) -> None:
    """Add files to the manifest of a graph, with what each is, and those that are missing, with the reason."""
    path = folder / MANIFEST
    if path.is_file():
        about = read_sealed(path)
        about["files"] |= files
        about["missing"] |= missing
        same = [name for name in files if not name.endswith(".bin")]  # in every run; executables of XLA are not
        about["sha256"] |= {name: digest((folder / name).read_bytes()) for name in same}
        _write_sealed(path, about)


def cause_text(event: Compilation) -> str:
    """Return why a graph was compiled, without the seconds, which differ from run to run."""
    first = f"graph {event.number}, {len(event.graph.nodes)} ops: {event.cause.headline}"
    return "\n".join([first, *[line.strip() for line in events.lines_of(event)[1:]]])


def _write(path: Path, text: str) -> str:
    """Write a file that is complete or absent whenever the process ends; return its digest."""
    data = text.encode()
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_bytes(data)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return digest(data)


def _write_sealed(path: Path, table: JsonObject) -> None:
    _write(path, _json_text(sealed(table)))


def _json_text(table: JsonObject) -> str:
    """Return a JSON object with one record of a list a line, so that files can be compared line by line."""
    parts = [f"{json.dumps(key)}: {_value(value)}" for key, value in table.items()]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _value(value: object) -> str:
    if isinstance(value, list) and value and isinstance(value[0], (dict, list)):
        return "[\n" + ",\n".join(json.dumps(v) for v in value) + "\n]"
    if isinstance(value, dict) and any(isinstance(v, (dict, list)) for v in value.values()):
        return "{\n" + ",\n".join(f"{json.dumps(k)}: {_value(v)}" for k, v in value.items()) + "\n}"
    return json.dumps(value, indent=1 if isinstance(value, (dict, list)) else None)


class _Dumper(Observer):
    """Writes each graph that is compiled."""

    def graph_compiled(self, compilation: Compilation) -> None:
        dump(compilation)


add(_Dumper())
