"""Reading the user's source to say which statement made two runs go different ways.  Asked on a miss only."""

from __future__ import annotations

import ast
import linecache
import os
from collections.abc import Iterator
from dataclasses import dataclass

_Loop = (ast.For, ast.AsyncFor, ast.While)
_Choice = (ast.If, ast.Match, ast.Try, *_Loop)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
MAX_TEXT = 60
Span = tuple[int | None, int | None, int | None, int | None]
"""First and last line, first and last column (in bytes) of an expression."""

_trees: dict[str, tuple[list[str], ast.Module | None]] = {}


@dataclass(frozen=True, slots=True)
class Branch:
    """A statement of which two lines are in different parts.

    Attributes:
        file, line, text: where it begins and its first line, without the indentation.
        loop: whether it is a loop.
        inside: whether the first of the two lines is inside it.
    """

    file: str
    line: int
    text: str
    loop: bool
    inside: bool


@dataclass(frozen=True, slots=True)
class Loop:
    """A ``for`` loop around a line: its line, the names it assigns, and the names and text of what it iterates over."""

    line: int
    targets: frozenset[str]
    sources: tuple[str, ...]
    over: str


def code_of(file: str, line: int) -> str:
    """A line of a file without indentation and comment; empty where the source is not at hand."""
    return linecache.getline(file, line).strip().partition("  #")[0].rstrip()


def line_text(file: str, line: int) -> str:
    """As `code_of`, shortened."""
    return short(code_of(file, line))


def short(text: str) -> str:
    """A text that is not too long to be in a line."""
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 3] + "..."


def branch_between(file: str, line: int, other: int) -> Branch | None:
    """The outermost statement of which two lines of one function are in different parts: what made the difference.

    For one and the same line it is that line, where it holds a conditional expression.
    """
    tree = _tree(file)
    if tree is None:
        return None
    if line == other:
        return _conditional_on(tree, file, line)
    around = _function_around(tree, line)
    if around is not _function_around(tree, other):
        return None
    for node in _nodes_at(around, line, other):
        if isinstance(node, _Choice) and not _is_loop_of_steps(node):
            parts = _part_of(node, line), _part_of(node, other)
            if parts[0] != parts[1] and (-1 not in parts or _leads_to(around, node, line if parts[0] < 0 else other)):
                return Branch(file, node.lineno, line_text(file, node.lineno), isinstance(node, _Loop), parts[0] == 0)
    return None


def same_function(file: str, line: int, other: int) -> bool:
    """Whether two lines are in one function, or both in none."""
    tree = _tree(file)
    return tree is not None and _function_around(tree, line) is _function_around(tree, other)


def entered_after(file: str, line: int, before: int) -> Branch | None:
    """The outermost statement of a function that one of its lines is inside of, and an earlier line is not."""
    tree = _tree(file)
    if tree is None or not same_function(file, line, before):
        return None
    around = _function_around(tree, line)
    for node in _nodes_at(around, line):
        if isinstance(node, _Choice) and not _is_loop_of_steps(node):
            part = _part_of(node, line)
            if part >= 0 and _part_of(node, before) != part:
                return Branch(file, node.lineno, line_text(file, node.lineno), isinstance(node, _Loop), part == 0)
    return None


def comprehension_on(file: str, line: int) -> Branch | None:
    """The outermost comprehension or generator expression that a line is in."""
    tree = _tree(file)
    for node in _nodes_at(tree, line) if tree is not None else ():
        if isinstance(node, _COMPREHENSIONS):
            return Branch(file, node.lineno, line_text(file, node.lineno), True, True)
    return None


def loops_around(file: str, line: int) -> list[Loop]:
    """The ``for`` loops that a line is in, the innermost first."""
    tree = _tree(file)
    if tree is None:
        return []
    found = []
    for node in _nodes_at(tree, line):
        if isinstance(node, (ast.For, ast.AsyncFor)):
            targets = frozenset(n.id for n in ast.walk(node.target) if isinstance(n, ast.Name))
            sources = tuple(n for n in map(_dotted, ast.walk(node.iter)) if n)
            found.append(Loop(node.lineno, targets, sources, short(ast.unparse(node.iter))))
    return found[::-1]


def nodes_with_span(file: str, span: Span) -> Iterator[ast.AST]:
    """The nodes of a file's syntax tree that begin and end where an instruction does, see ``co_positions``."""
    tree = _tree(file)
    if tree is None or None in span:
        return
    line, last, column, end = span
    for node in _nodes_at(tree, line):  # type: ignore[arg-type]
        if (getattr(node, "lineno", 0), getattr(node, "end_lineno", 0)) == (line, last):
            if (node.col_offset, node.end_col_offset) == (column, end):  # type: ignore[attr-defined]
                yield node


def conditions_with_span(file: str, span: Span) -> Iterator[str]:
    """What an expression at a place is the condition of: ``if``, ``while``, ``assert``, ``not``, ``and``, ``or``."""
    found = list(nodes_with_span(file, span))
    tree = _tree(file)
    for node in _nodes_at(tree, span[0]) if tree is not None and span[0] and found else ():
        if isinstance(node, (ast.If, ast.While, ast.Assert, ast.IfExp)) and (node in found or node.test in found):
            yield "if" if isinstance(node, ast.IfExp) else type(node).__name__.lower()
        elif isinstance(node, ast.comprehension) and any(test in found for test in node.ifs):
            yield "if"
        elif isinstance(node, ast.match_case) and node.guard in found:
            yield "if"
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not) and node.operand in found:
            yield "not"
        elif isinstance(node, ast.BoolOp) and (node in found or any(value in found for value in node.values)):
            yield type(node.op).__name__.lower()


def place(file: str, line: int) -> str:
    """``train.py:12``."""
    return f"{os.path.basename(file)}:{line}"


def _dotted(node: ast.AST) -> str:
    """``self.loader`` for that expression; empty for other things than names and their attributes."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def _tree(file: str) -> ast.Module | None:
    """A file's syntax tree, kept for as long as `linecache` keeps the same lines of it."""
    lines = linecache.getlines(file)
    if not lines:
        return None
    if file not in _trees or _trees[file][0] is not lines:
        try:
            _trees[file] = lines, ast.parse("".join(lines))
        except (SyntaxError, ValueError):
            _trees[file] = lines, None
    return _trees[file][1]


def _nodes_at(node: ast.AST, *lines: int) -> Iterator[ast.AST]:
    """What is below a node and has one of some lines in it, the outer ones before those in them."""
    for child in ast.iter_child_nodes(node):
        first = getattr(child, "lineno", None)
        if first is None or any(first <= line <= child.end_lineno for line in lines):  # type: ignore[attr-defined]
            yield child
            yield from _nodes_at(child, *lines)


def _function_around(tree: ast.Module, line: int) -> ast.AST:
    found: ast.AST = tree
    for node in _nodes_at(tree, line):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found = node
    return found


def _part_of(node: ast.stmt, line: int) -> int:
    """Which part of a statement a line is in: 0 for the body, others for its other parts, -1 where it is outside."""
    if not node.lineno <= line <= (node.end_lineno or 0):
        return -1
    parts = [getattr(node, "body", []), *[h.body for h in getattr(node, "handlers", [])], getattr(node, "orelse", [])]
    if isinstance(node, ast.Match):
        parts = [[], *[case.body for case in node.cases]]
    for i, part in enumerate(parts):
        if part and part[0].lineno <= line <= (part[-1].end_lineno or 0):
            return i
    return -1  # the condition itself, which is evaluated either way


def _is_loop_of_steps(node: ast.stmt) -> bool:
    """Whether each turn of a loop is a step of its own: how often it turns changes no graph."""
    if not isinstance(node, _Loop):
        return False
    text = ast.unparse(node)
    return any(end in text for end in ("mark_step(", ".sync(", "DeviceLoader("))


def _leads_to(around: ast.AST, node: ast.stmt, line: int) -> bool:
    """Whether a line outside a statement comes after it: further down, or in the next turn of a loop around both."""
    if line > (node.end_lineno or 0):
        return True
    loops = [s for s in _nodes_at(around, line, node.lineno) if isinstance(s, _Loop) and s is not node]
    return any(s.lineno <= min(line, node.lineno) and max(line, node.lineno) <= (s.end_lineno or 0) for s in loops)


def _conditional_on(tree: ast.Module, file: str, line: int) -> Branch | None:
    for node in _nodes_at(tree, line):
        if isinstance(node, (ast.IfExp, ast.BoolOp)):
            return Branch(file, node.lineno, line_text(file, node.lineno), False, True)
        if isinstance(node, ast.If) and node.lineno == line == node.body[0].lineno:
            return Branch(file, line, line_text(file, line), False, True)
    return None
