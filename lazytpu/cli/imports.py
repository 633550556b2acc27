"""What a script imports, read from its source and from that of its own modules before anything of it runs.

Followed are import statements, also relative ones and those of a package's ``__init__.py``, and calls with
the name written out: ``import_module("x")``, ``__import__("x")``, ``runpy.run_module("x")``,
``runpy.run_path("x.py")``, ``exec(open("x.py").read())``.  A module is the script's own if it lies below
the script's folder or the current one, and is not an installed package.
"""

from __future__ import annotations

import ast
import importlib.machinery
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_BY_NAME = {"import_module", "__import__", "run_module"}
_BY_FILE = {"run_path", "exec", "spec_from_file_location", "SourceFileLoader", "load_source"}
_INSTALLED = ("site-packages", "dist-packages")


def is_own(file: str, places: list[str]) -> bool:
    """Whether a file lies below one of the folders, and not in an environment's folder of packages."""
    full = Path(os.path.realpath(file))
    return any(full.is_relative_to(place) for place in places) and not any(p in full.parts for p in _INSTALLED)


def places_of(target: str, is_module: bool) -> list[str]:
    """The folders below which a script's own modules lie: its own and the current one."""
    folder = Path() if is_module else Path(target).parent
    return list(dict.fromkeys([os.path.realpath(folder), os.path.realpath(os.curdir)]))


@dataclass(slots=True)
class _Source:
    """Python source.

    Attributes:
        text: what is in it.
        folder: where it lies.
        package: the name that its relative imports begin from; empty for a script.
    """

    text: bytes | str
    folder: Path
    package: str = ""

    def names(self) -> Iterator[str | Path]:
        """The absolute names of the modules it imports, and the files it runs; none where it is not Python."""
        try:
            tree = ast.parse(self.text)
        except (SyntaxError, ValueError):  # running it will say what is wrong
            return
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                yield from self._imported_from(node)
            elif isinstance(node, ast.Call):
                yield from self._called(node)

    def _imported_from(self, node: ast.ImportFrom) -> Iterator[str]:
        parts = self.package.split(".") if self.package else []
        if node.level > len(parts) and node.level:
            return
        start = parts[: len(parts) - node.level + 1] if node.level else []
        module = ".".join([*start, *([node.module] if node.module else [])])
        yield module
        yield from (f"{module}.{alias.name}" for alias in node.names)

    def _called(self, node: ast.Call) -> Iterator[str | Path]:
        function = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
        if function in _BY_NAME:
            yield from (text for text in _texts(node.args[:1]) if text.isprintable())
        elif function in _BY_FILE:
            for text in _texts([*node.args, *(k.value for k in node.keywords)]):
                if text.endswith(".py"):  # of an f-string, the part after the folder
                    places = (self.folder / text, Path(text), self.folder / text.lstrip("/"))
                    yield from (path for path in places if path.is_file())
                elif function == "exec":
                    yield from _Source(text, self.folder, self.package).names()


def _texts(nodes: list[ast.expr]) -> Iterator[str]:
    """The strings that are written out in expressions."""
    for node in nodes:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                yield inner.value


@dataclass(slots=True)
class Imports:
    """A walk through the imports of a script.

    Attributes:
        target: a file, a folder or zip with ``__main__.py``, or the name of a module.
        is_module: whether it is a module's name.
    """

    target: str
    is_module: bool = False
    _places: list[str] = field(init=False)
    _path: list[str] = field(init=False)
    _known: dict[str, importlib.machinery.ModuleSpec | None] = field(init=False, default_factory=dict)
    _read: set[str] = field(init=False, default_factory=set)

    def __post_init__(self) -> None:
        self._places = places_of(self.target, self.is_module)
        rest = [entry for entry in sys.path[1:] if is_own(entry or os.curdir, self._places)]
        self._path = [self._places[0], *rest]
        top = self.target.partition(".")[0]
        if self.is_module and _find(top, self._path) is None:  # installed: itself, but not the packages beside it
            self._known[top] = _find(top, sys.path)

    def names(self) -> Iterator[str]:
        """The names of all modules that are imported, by the script first."""
        seen: set[str | Path] = set()
        waiting = list(self._first())
        while waiting:
            for name in waiting.pop(0).names():
                if name in seen:
                    continue
                seen.add(name)
                if isinstance(name, Path):
                    waiting += self._file(name)
                else:
                    yield name
                    waiting += self._modules(name)

    def _first(self) -> Iterator[_Source]:
        if not self.is_module:
            if os.path.isfile(self.target) and not self.target.endswith((".zip", ".pyz", ".pyc")):
                yield from self._file(Path(self.target))
                return
            self._path = [self.target, *self._path]
        name = self.target if self.is_module else "__main__"
        yield from self._modules(name)
        if self.is_module:
            yield from self._modules(f"{name}.__main__")

    def _file(self, path: Path) -> Iterator[_Source]:
        try:
            yield _Source(path.read_bytes(), path.parent)
        except OSError:
            return

    def _modules(self, name: str) -> Iterator[_Source]:
        """The sources of a module of the script's own and of the packages that hold it, those not read before."""
        path: Any = self._path
        parts = name.split(".")
        for n in range(1, len(parts) + 1):
            full = ".".join(parts[:n])
            if full == "lazytpu" or not all(parts[:n]):
                return
            if full not in self._known:
                self._known[full] = _find(full, path)
            spec = self._known[full]
            if full not in self._read:
                self._read.add(full)
                source = _source_of(spec)
                if source is not None:
                    yield source
            if spec is None or spec.submodule_search_locations is None:
                return
            path = list(spec.submodule_search_locations)


def _find(name: str, path: list[str]) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.machinery.PathFinder.find_spec(name, path)
    except Exception:  # a finder of somebody else's
        return None


def _source_of(spec: importlib.machinery.ModuleSpec | None) -> _Source | None:
    """The source of a module, from a folder or a zip; None for one that is compiled."""
    loader: Any = None if spec is None else spec.loader
    if spec is None or spec.origin is None or not hasattr(loader, "get_source"):
        return None
    try:
        text = loader.get_source(spec.name)
    except (ImportError, OSError):
        return None
    return _Source(text, Path(spec.origin).parent, spec.parent or "") if text is not None else None
