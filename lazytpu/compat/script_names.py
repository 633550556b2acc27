"""The full names of what a script uses of the modules it imports, read from its source.

Followed are ``import a.b as c``, ``from a import b``, ``from a import *``, ``importlib.import_module("a.b")``,
``getattr(a, "b")`` and names given to any of these: ``m = a.b``, ``self.m = a.b``.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator

Use = tuple[str, int]
"""A full name and its line."""


class ScriptNames:
    """The names of one script.

    Args:
        tree: the script.
        star: from a module's name to the names that ``from module import *`` brings in.
    """

    def __init__(self, tree: ast.AST, star: Callable[[str], Iterable[str]]) -> None:
        self._nodes = list(ast.walk(tree))
        self._known: dict[str, str] = {}  # what the script calls it to its full name
        self._imports: list[Use] = []
        for node in self._nodes:
            if isinstance(node, ast.Import):
                self._import(node)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                self._import_from(node, node.module, star)
        while self._follow_assignments():
            pass

    def uses(self) -> Iterator[Use]:
        """What is imported and what is used, the longest form of each."""
        yield from self._imports
        inner = {id(part) for node in self._nodes if (part := _inner(node)) is not None}
        for node in self._nodes:
            if isinstance(node, (ast.Attribute, ast.Name)) and not isinstance(node.ctx, ast.Load):
                continue
            if isinstance(node, (ast.Attribute, ast.Name, ast.Call)) and id(node) not in inner:
                full = self._full(node)
                if full is not None:
                    yield full, node.lineno

    def _import(self, node: ast.Import) -> None:
        for alias in node.names:
            top = alias.name.partition(".")[0]
            self._known[alias.asname or top] = alias.name if alias.asname else top
            self._imports.append((alias.name, node.lineno))

    def _import_from(self, node: ast.ImportFrom, module: str, star: Callable[[str], Iterable[str]]) -> None:
        for alias in node.names:
            if alias.name == "*":
                self._known |= {name: f"{module}.{name}" for name in star(module)}
                self._imports.append((module, node.lineno))
            else:
                self._known[alias.asname or alias.name] = full = f"{module}.{alias.name}"
                self._imports.append((full, node.lineno))

    def _follow_assignments(self) -> bool:
        """Notes the names that were given to what is known; whether there were new ones."""
        before = len(self._known)
        for node in self._nodes:
            if isinstance(node, ast.Assign) and (full := self._full(node.value)) is not None:
                for target in node.targets:
                    if (text := _text(target)) is not None:
                        self._known.setdefault(text, full)
        return len(self._known) > before

    def _full(self, node: ast.expr) -> str | None:
        """The full name of what an expression is; None for what is not imported."""
        text = _text(node)
        if text in self._known:
            return self._known[text]
        if isinstance(node, ast.Attribute):
            base = self._full(node.value)
            return None if base is None else f"{base}.{node.attr}"
        if not isinstance(node, ast.Call) or not node.args:
            return None
        function, literals = (_text(node.func) or "").rpartition(".")[2], [_literal(a) for a in node.args]
        if function == "import_module" and literals[0] is not None:
            return literals[0]
        if function == "__import__" and literals[0] is not None:
            whole = len(node.args) > 3 or any(keyword.arg == "fromlist" for keyword in node.keywords)
            return literals[0] if whole else literals[0].partition(".")[0]
        if function == "getattr" and len(literals) > 1 and literals[1] is not None:
            base = self._full(node.args[0])
            return None if base is None else f"{base}.{literals[1]}"
        return None


def _text(node: ast.expr) -> str | None:
    """A dotted name as it is written."""
    if isinstance(node, ast.Name):
        return node.id
    base = _text(node.value) if isinstance(node, ast.Attribute) else None
    return f"{base}.{node.attr}" if base is not None and isinstance(node, ast.Attribute) else None


def _literal(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _inner(node: ast.AST) -> ast.expr | None:
    """The part of a name that a longer one begins with."""
    if isinstance(node, ast.Attribute):
        return node.value
    return node.args[0] if isinstance(node, ast.Call) and _text(node.func) == "getattr" and node.args else None
