"""Makes a failing program small: fewer statements, simpler expressions, smaller numbers."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Callable, Iterator

from tests.fuzz.program import Program

Fails = Callable[[Program], bool]
_NUMBER = re.compile(r"(?<![\w.])\d+(?![\w.]*\w)")
Line = tuple[str, str]  # the part of the program, the statement


def reduced(program: Program, fails: Fails, tries: int = 400) -> Program:
    """The smallest program found that still fails.

    Args:
        fails: whether a candidate fails in the same way; it has to say no to one that is not defined.
        tries: how often it may be asked.
    """
    left = [tries]

    def still(candidate: Program) -> bool:
        left[0] -= 1
        return left[0] >= 0 and fails(candidate)

    if program.mode != "trace":
        for mode, calls, fresh in ((program.mode, 1, True), (program.mode, program.calls, True)):
            simpler = dataclasses.replace(program, mode=mode, calls=calls, fresh=fresh)
            if simpler != program and still(simpler):
                program = simpler
                break
        traced = dataclasses.replace(program, mode="trace", calls=1, body=program.body + program.after, after=())
        if still(traced):
            program = traced
    while True:
        before = program
        program = _fewer(program, still)
        for simplified in (_simpler, _smaller):
            program = _first_while(program, simplified, still)
        if program == before or left[0] <= 0:
            return program


def _lines(program: Program) -> list[Line]:
    return [(part, text) for part in ("inputs", "body", "after") for text in getattr(program, part)]


def _of_lines(program: Program, lines: list[Line]) -> Program:
    parts = {part: tuple(text for p, text in lines if p == part) for part in ("inputs", "body", "after")}
    return dataclasses.replace(program, **parts)


def _fewer(program: Program, still: Fails) -> Program:
    """Delta debugging: leaves out ever smaller stretches of statements, from the end."""
    lines = _lines(program)
    size = max(len(lines) // 2, 1)
    while True:
        at = len(lines)
        while at > 0:
            start = max(at - size, 0)
            rest = lines[:start] + lines[at:]
            if still(_of_lines(program, rest)):
                lines = rest
            at = start
        if size == 1:
            return _of_lines(program, lines)
        size = max(size // 2, 1)


def _first_while(program: Program, candidates: Callable[[Program], Iterator[Program]], still: Fails) -> Program:
    """Takes the first candidate that fails, again and again, until none does."""
    found = True
    while found:
        found = False
        for candidate in candidates(program):
            if still(candidate):
                program, found = candidate, True
                break
    return program


def _simpler(program: Program) -> Iterator[Program]:
    """Each with one expression replaced by a part of it."""
    lines = _lines(program)
    for i, (part, text) in enumerate(lines):
        for shorter in _parts(text):
            yield _of_lines(program, [*lines[:i], (part, shorter), *lines[i + 1 :]])
        if same := re.fullmatch(r"(\w+) = (\w+)", text):
            rest = [(p, re.sub(rf"\b{same[1]}\b", same[2], t)) for p, t in lines[i + 1 :]]
            yield _of_lines(program, [*lines[:i], *rest])


def _parts(text: str) -> list[str]:
    """A statement, each time with one node of its tree replaced by a child."""
    tree = ast.parse(text)
    texts = []
    for node in ast.walk(tree):
        for child in _children(node):
            texts.append(_replaced(text, node, child))
    return sorted({t for t in texts if len(t) < len(text) and _parses(t)}, key=len)


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def _children(node: ast.AST) -> list[ast.AST]:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        inner = node.func.value
        if isinstance(inner, ast.Name) and inner.id in ("torch", "lazytpu"):
            return []
        return [] if node.func.attr == "backward" else [inner]
    if isinstance(node, ast.BinOp):
        return [node.left, node.right]
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
        return [node.value]
    if isinstance(node, ast.UnaryOp):
        return [node.operand]
    return []


def _replaced(text: str, node: ast.AST, child: ast.AST) -> str:
    inner = ast.get_source_segment(text, child) or ""
    if isinstance(child, (ast.BinOp, ast.UnaryOp)):  # the segment is without its parentheses
        inner = f"({inner})"
    return text[: node.col_offset] + inner + text[node.end_col_offset :]  # type: ignore[attr-defined]


def _smaller(program: Program) -> Iterator[Program]:
    """Each with one number made smaller, alone or together with its multiples."""
    lines = _lines(program)
    numbers = sorted({int(n) for _, text in lines for n in _NUMBER.findall(text) if int(n) > 1}, reverse=True)
    for number in numbers:
        for less in sorted({1, 2, 3, number // 2, number // 2 + 1, number - 1} - {number}):
            if less >= number or less < 1:
                continue

            def scaled(found: re.Match[str], number: int = number, less: int = less) -> str:
                n = int(found[0])
                return str(n // number * less) if n and n % number == 0 else found[0]

            yield _of_lines(program, [(part, _NUMBER.sub(scaled, text)) for part, text in lines])
            for i, (part, text) in enumerate(lines):
                exact = re.sub(rf"(?<![\w.]){number}(?!\w)", str(less), text)
                scale = _NUMBER.sub(scaled, text)
                for changed in {exact, scale} - {text}:
                    yield _of_lines(program, [*lines[:i], (part, changed), *lines[i + 1 :]])
