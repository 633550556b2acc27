"""Read what `lazytpu.debug.dump` wrote."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from lazytpu.observe.metrics_tables import Step

MANIFEST = "manifest.json"
JsonObject: TypeAlias = dict[str, Any]
"""A JSON object, as it is read or written; docs/reference/dump-files.md has the fields of each."""


class NotADump(ValueError):
    """The path holds no dump."""


@dataclass
class DumpedGraph:
    """One graph of a dump."""

    folder: Path

    @cached_property
    def manifest(self) -> JsonObject:
        """Return the contents of ``manifest.json``."""
        return read_json(self.folder / MANIFEST)

    @property
    def name(self) -> str:
        """Return ``graph-001-<hash>``."""
        return self.folder.name

    @property
    def number(self) -> int:
        """Return the number of the compilation, from 1."""
        return int(self.manifest["number"])

    def text(self, file: str) -> str:
        """Return the text of a file; empty where the dump lacks it."""
        path = self.folder / file
        return path.read_text() if path.is_file() else ""

    def table(self, file: str) -> JsonObject:
        """Return a file of JSON; empty where the dump lacks it."""
        path = self.folder / file
        return read_json(path) if path.is_file() else {}


@dataclass
class Dump:
    """A dump of a run."""

    folder: Path

    @cached_property
    def manifest(self) -> JsonObject:
        """Return the contents of ``manifest.json``."""
        return read_json(self.folder / MANIFEST)

    @cached_property
    def graphs(self) -> list[DumpedGraph]:
        """Return the graphs in the order they were compiled."""
        return [DumpedGraph(self.folder / name) for name in self.manifest["graphs"]]

    def graph(self, number: int) -> DumpedGraph:
        """Return the graph of that number.

        Raises:
            NotADump: there is none.
        """
        for graph in self.graphs:
            if graph.number == number:
                return graph
        numbers = ", ".join(str(g.number) for g in self.graphs)
        raise NotADump(f"{self.folder} has no graph {number}; it has {numbers or 'none'}")

    @cached_property
    def compiles(self) -> dict[str, JsonObject]:
        """Map each graph to the times of its compilation."""
        return {line["graph"]: line for line in read_lines(self.folder / "times" / "compiles.jsonl")}

    @cached_property
    def steps(self) -> list[JsonObject]:
        """Return what each step cost."""
        return read_lines(self.folder / "times" / "steps.jsonl")

    @cached_property
    def summary(self) -> JsonObject:
        """Return cuts, reads and fallbacks with their lines; empty where the run was killed."""
        path = self.folder / "times" / "summary.json"
        return read_json(path) if path.is_file() else {}

    def sources(self) -> dict[str, str]:
        """Map the path of each file of the program to its text when it ran."""
        copies = self.manifest.get("sources", {})
        return {path: (self.folder / copy).read_text() for path, copy in copies.items()}


def open_dump(path: Path) -> Dump:
    """Open the dump in a folder.

    Raises:
        NotADump: there is none; says how to make one.
    """
    if not (path / MANIFEST).is_file() or "graphs" not in read_json(path / MANIFEST):
        what = "does not exist" if not path.exists() else "is not a dump"
        raise NotADump(f"{path} {what}; `python -m lazytpu run --dump {path} SCRIPT` writes one")
    return Dump(path)


def open_graph(path: Path) -> DumpedGraph | None:
    """Open the graph in a folder; None where there is none."""
    if (path / MANIFEST).is_file() and "number" in read_json(path / MANIFEST):
        return DumpedGraph(path)
    return None


def steps_of(path: Path) -> list[Step]:
    """Read the steps in a file of them (``metrics_file``); none where it holds something else."""
    rows = read_lines(path) if path.suffix == ".jsonl" else []
    return [Step(**row) for row in rows] if all(row.keys() == set(Step._fields) for row in rows) else []


def read_json(path: Path) -> JsonObject:
    """Read a JSON object.

    Raises:
        NotADump: it is none.
    """
    try:
        made = json.loads(path.read_text())
    except ValueError as error:
        raise NotADump(f"{path} is not JSON: {error}") from None
    if not isinstance(made, dict):
        raise NotADump(f"{path} holds no JSON object")
    return made


def read_lines(path: Path) -> list[JsonObject]:
    """Read JSON objects, one a line; a last line that was cut off is left out."""
    found = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found
