"""Read the user's source to say which statement made two runs take different control paths.  Asked on a miss only."""

from __future__ import annotations

import ast
import linecache
import os
from collections.abc import Iterator
from dataclasses import dataclass

_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_CONDITIONS = (ast.If, ast.IfExp, ast.BoolOp)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_ENDS_OF_STEPS = ("mark_step(", ".sync(", "DeviceLoader(")
_MAX_TEXT = 60

_trees: dict[str, tuple[list[str], ast.Module | None]] = {}


@dataclass(frozen=True, slots=True)
class Branch:
    """A statement or expression that decides which of two lines runs.

    Attributes:
        file, line, text: where it begins and its first line, without the indentation.
        loop: whether it is a loop.
        inside: whether the first of the two lines is in its body.
    """

    file: str
    line: int
    text: str
    loop: bool = False
    inside: bool = True


def code_of(file: str, line: int) -> str:
    """Return a line of a file without indentation and comment; empty where the source is not at hand."""
    return linecache.getline(file, line).strip().partition("  #")[0].rstrip()


def line_text(file: str, line: int) -> str:
    """Return what `code_of` does, shortened."""
    return short(code_of(file, line))


def short(text: str) -> str:
    """Return a text cut to what fits in a line."""
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 3] + "..."


def place(file: str, line: int) -> str:
    """Return ``train.py:12``."""
    return f"{os.path.basename(file)}:{line}"


def branch_between(file: str, line: int, other: int) -> Branch | None:
    """Find the outermost ``if`` or loop of a function that has one of two lines in its body and the other not.

    The other line is in another part of the statement, or further down.  For one and the same line it is a condition
    on that line.
    """
    tree = _tree(file)
    if tree is None:
        return None
    if line == other:
        return _first_on(tree, file, line, _CONDITIONS)
    function = _function_around(tree, line)
    if function is not _function_around(tree, other):
        return None
    for node in _nodes_at(function, line, other):
        if isinstance(node, (ast.If, *_LOOPS)) and not _is_loop_of_steps(node, file):
            parts = _part_of(node, line), _part_of(node, other)
            if parts[0] != parts[1] and "before" not in parts:
                is_loop = isinstance(node, _LOOPS)
                return Branch(file, node.lineno, line_text(file, node.lineno), is_loop, parts[0] == "body")
    return None


def comprehension_on(file: str, line: int) -> Branch | None:
    """Find the outermost comprehension or generator expression on a line."""
    tree = _tree(file)
    return None if tree is None else _first_on(tree, file, line, _COMPREHENSIONS)


def _first_on(tree: ast.Module, file: str, line: int, kinds: tuple[type[ast.AST], ...]) -> Branch | None:
    """Find the outermost node of some kinds on a line; of an ``if``, one that is on one line with its body."""
    for node in _nodes_at(tree, line):
        is_split = isinstance(node, ast.If) and not node.lineno == line == node.body[0].lineno
        if isinstance(node, kinds) and not is_split:
            return Branch(file, line, line_text(file, line), kinds is _COMPREHENSIONS)
    return None


def _tree(file: str) -> ast.Module | None:
    """Return a file's syntax tree, kept for as long as `linecache` keeps the same lines of it."""
    lines = linecache.getlines(file)
    if file not in _trees or _trees[file][0] is not lines:
        try:
            _trees[file] = lines, ast.parse("".join(lines))
        except (SyntaxError, ValueError):
            _trees[file] = lines, None
    return _trees[file][1]


def _nodes_at(node: ast.AST, *lines: int) -> Iterator[ast.AST]:
    """Yield what is below a node and has one of some lines in it, outer nodes first."""
    for child in ast.iter_child_nodes(node):
        first, last = getattr(child, "lineno", None), getattr(child, "end_lineno", None)
        if first is None or any(first <= line <= (last or first) for line in lines):
            yield child
            yield from _nodes_at(child, *lines)


def _function_around(tree: ast.Module, line: int) -> ast.AST:
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return next(reversed([node for node in _nodes_at(tree, line) if isinstance(node, functions)]), tree)


def _part_of(node: ast.If | ast.For | ast.AsyncFor | ast.While, line: int) -> str:
    """Return where a line is: in the ``body``, in the ``else``, ``before`` the body or ``after`` the statement."""
    if line > (node.end_lineno or 0):
        return "after"
    if node.orelse and line >= node.orelse[0].lineno:
        return "else"
    return "body" if line >= node.body[0].lineno else "before"


def _is_loop_of_steps(node: ast.stmt, file: str) -> bool:
    """Return whether each iteration of a loop is a step of its own: their number changes no graph."""
    lines = linecache.getlines(file)[node.lineno - 1 : node.end_lineno]
    return isinstance(node, _LOOPS) and any(end in text for text in lines for end in _ENDS_OF_STEPS)
