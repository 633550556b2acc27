"""Read what `lazytpu.debug.dump` wrote, and notice what has changed since."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

from lazytpu.observe.metrics_tables import Step

MANIFEST = "manifest.json"
_SEAL, _DIGESTS = "seal", "sha256"
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
        return read_sealed(self.folder / MANIFEST)

    @property
    def name(self) -> str:
        """Return ``graph-001-<hash>``."""
        return self.folder.name

    @property
    def number(self) -> int:
        """Return the number of the compilation, from 1."""
        return int(self.manifest["number"])

    def text(self, file: str) -> str:
        """Return the text of a file; empty where the dump lacks it.

        Raises:
            NotADump: the file has changed since it was written.
        """
        return _checked(self.folder, file, self.manifest)

    def table(self, file: str) -> JsonObject:
        """Return a file of JSON; empty where the dump lacks it.

        Raises:
            NotADump: the file has changed since it was written.
        """
        text = self.text(file)
        made: JsonObject = json.loads(text) if text else {}
        return made


@dataclass
class Dump:
    """A dump of a run."""

    folder: Path

    @cached_property
    def manifest(self) -> JsonObject:
        """Return the contents of ``manifest.json``."""
        return read_sealed(self.folder / MANIFEST)

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
        rows = read_lines(self.folder / "times" / "compiles.jsonl")
        return {row["graph"]: row for row in rows if row.keys() == COMPILES and _are_numbers(row, COMPILES - {"graph"})}

    @cached_property
    def steps(self) -> list[JsonObject]:
        """Return what each step cost."""
        return [row for row in read_lines(self.folder / "times" / "steps.jsonl") if _is_step(row)]

    @cached_property
    def summary(self) -> JsonObject:
        """Return cuts, reads and fallbacks with their lines; empty where the run was killed."""
        path = self.folder / "times" / "summary.json"
        return read_sealed(path) if path.is_file() else {}

    def sources(self) -> dict[str, str]:
        """Map the path of each file of the program to its text when it ran."""
        copies = self.manifest.get("sources", {})
        return {path: _checked(self.folder, copy, self.manifest) for path, copy in copies.items()}


def open_dump(path: Path) -> Dump:
    """Open the dump in a folder.

    Raises:
        NotADump: there is none; says how to make one.
    """
    if not (path / MANIFEST).is_file() or "graphs" not in read_sealed(path / MANIFEST):
        what = "does not exist" if not path.exists() else "is not a dump"
        raise NotADump(f"{path} {what}; `python -m lazytpu run --dump {path} SCRIPT` writes one")
    return Dump(path)


def open_graph(path: Path) -> DumpedGraph | None:
    """Open the graph in a folder; None where there is none."""
    if (path / MANIFEST).is_file() and "number" in read_sealed(path / MANIFEST):
        return DumpedGraph(path)
    return None


def steps_of(path: Path) -> list[Step]:
    """Read the steps in a file of them (``metrics_file``); none where it holds something else."""
    rows = read_lines(path) if path.suffix == ".jsonl" else []
    return [Step(**row) for row in rows] if all(map(_is_step, rows)) else []


COMPILES = {"graph", "at_s", "lower_s", "compile_s"}
"""The fields of a line of ``times/compiles.jsonl``."""
_MEASURED = {"recording_s", "running_s"}  # None in steps in which nobody measured


def _is_step(row: JsonObject) -> bool:
    fields = set(Step._fields)
    missing = {name for name in _MEASURED & row.keys() if row[name] is None}
    return row.keys() == fields and _are_numbers(row, fields - missing)


def _are_numbers(row: JsonObject, names: set[str]) -> bool:
    return all(type(row[name]) in (int, float) for name in names)


def digest(data: bytes) -> str:
    """Return the sha256 of the contents of a file, as manifests list it."""
    return hashlib.sha256(data).hexdigest()


def sealed(table: JsonObject) -> JsonObject:
    """Return a JSON object with a digest of its own contents, by which `read_sealed` notices a change."""
    return {**table, _SEAL: digest(json.dumps(table, sort_keys=True).encode())}


def read_sealed(path: Path) -> JsonObject:
    """Read what `sealed` made.

    Raises:
        NotADump: it is no JSON object, or has changed since it was written.
    """
    try:
        made = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise NotADump(f"{path} is not JSON: {error}") from None
    if not isinstance(made, dict):
        raise NotADump(f"{path} holds no JSON object")
    seal = made.pop(_SEAL, None)
    if seal != sealed(made)[_SEAL]:
        raise _changed(path) if seal else NotADump(f"{path} was not written by this lazytpu: it has no seal")
    return made


def _checked(folder: Path, file: str, manifest: JsonObject) -> str:
    """Return the text of a file whose digest is the one in the manifest; empty where the dump lacks it."""
    path = folder / file
    if not path.is_file():
        return ""
    data = path.read_bytes()
    if digest(data) != manifest[_DIGESTS].get(file):
        raise _changed(path)
    return data.decode()


def _changed(path: Path) -> NotADump:
    return NotADump(f"{path} has changed since it was written, or was cut off")


def read_lines(path: Path) -> list[JsonObject]:
    """Read JSON objects, one a line; lines that are damaged, and a last one that was cut off, are left out."""
    found = []
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            found.append(row)
    return found
