"""HLO text, parsed as far as the reports need it: computations, instructions, operands, metadata."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

# Bytes of an element; types of 4 bits and less are counted as half a byte and up.
_BITS = {"pred": 8, "token": 0, "opaque": 0}
_ARRAY = re.compile(r"([a-z]+\d*(?:e\d+m\d+\w*)?|pred|token)\[([\d,<=? ]*)\]")
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-~]+)(?: \(.*)? \{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-~]+) = ")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|branch_computations|called_computations)=\{?([^,}]+(?:, %[^,}]+)*)"
)
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_COMMENT = re.compile(r"/\*.*?\*/")


@dataclass(slots=True)
class Instruction:
    """One instruction.

    Attributes:
        line: its line in the text, from 1.
        name, type, opcode: as printed, the name without ``%``.
        operands: names of the operands.
        attributes: what follows the operands.
        op_name: of the metadata, empty where XLA made the instruction without saying from what.
        called: computations it applies.
        literal: what stands between the parentheses of a constant or parameter.
        root: whether it is the result of its computation.
    """

    line: int
    name: str
    type: str
    opcode: str
    operands: list[str]
    attributes: str
    op_name: str
    called: list[str]
    literal: str = ""
    root: bool = False

    @property
    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """(element type, sizes) of the result, several for a tuple."""
        return shapes_of(self.type)


@dataclass(slots=True)
class Computation:
    """A list of instructions; ``line`` is that of its header."""

    name: str
    line: int
    entry: bool
    instructions: list[Instruction] = field(default_factory=list)


@dataclass
class Module:
    """A parsed module."""

    name: str
    computations: dict[str, Computation]

    @cached_property
    def entry(self) -> Computation:
        """The computation that runs first."""
        return next(c for c in self.computations.values() if c.entry)

    @cached_property
    def callers(self) -> dict[str, list[tuple[Computation, Instruction]]]:
        """Computation to the instructions that apply it."""
        found: dict[str, list[tuple[Computation, Instruction]]] = {}
        for computation, instruction in self.instructions():
            for name in instruction.called:
                found.setdefault(name, []).append((computation, instruction))
        return found

    def instructions(self) -> Iterator[tuple[Computation, Instruction]]:
        """Every instruction with its computation, in the order of the text."""
        for computation in self.computations.values():
            for instruction in computation.instructions:
                yield computation, instruction


def parse(text: str) -> Module:
    """Reads a module in XLA's long or short form."""
    module = Module("", {})
    current: Computation | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if current is None:
            if line.startswith("HloModule "):
                module.name = line[10:].partition(",")[0]
            elif match := _HEADER.match(line):
                current = Computation(match[2], number, bool(match[1]))
                module.computations[current.name] = current
        elif line.startswith("}"):
            current = None
        elif match := _INSTRUCTION.match(line):
            current.instructions.append(_instruction(line, match, number))
    return module


def _instruction(line: str, match: re.Match[str], number: int) -> Instruction:
    rest = line[match.end() :]
    end = _balanced(rest, 0) if rest.startswith("(") else rest.index(" ")
    kind, rest = rest[:end], rest[end:].lstrip()
    opcode, _, _ = rest.partition("(")
    close = _balanced(rest, len(opcode))
    inside, attributes = rest[len(opcode) + 1 : close - 1], rest[close:].removeprefix(",").strip()
    named = opcode not in ("constant", "parameter", "iota")
    name = _OP_NAME.search(attributes)
    called = [c.strip().lstrip("%") for group in _CALLED.findall(attributes) for c in group.split(",")]
    return Instruction(
        number,
        match[2],
        kind,
        opcode,
        _operands(inside) if named else [],
        attributes,
        name[1] if name else "",
        called,
        "" if named else inside,
        bool(match[1]),
    )


def _balanced(text: str, start: int) -> int:
    """The position behind the parenthesis that closes the one at ``start``."""
    depth = 0
    for match in re.compile(r'[()]|"(?:[^"\\]|\\.)*"').finditer(text, start):
        depth += (match[0] == "(") - (match[0] == ")")
        if depth == 0 and match[0] in "()":
            return match.end()
    return len(text)


def _operands(inside: str) -> list[str]:
    """Names among ``f32[2]{0} %a, (s32[], f32[2]) %b`` or ``%a, /*index=1*/%b`` or ``a, b``."""
    found, depth, last = [], 0, 0
    text = _COMMENT.sub("", inside)
    for i, c in enumerate([*text, ","]):
        depth += (c in "([{") - (c in ")]}")
        if c == "," and depth == 0:
            part = text[last:i].strip()
            last = i + 1
            if part:
                found.append(part.split(" ")[-1].lstrip("%"))
    return found


def shapes_of(kind: str) -> list[tuple[str, tuple[int, ...]]]:
    """``f32[2,3]{1,0}`` is ``[("f32", (2, 3))]``; a tuple has several."""
    return [
        (dtype, tuple(int(re.sub(r"\D", "", n)) for n in sizes.split(",") if n.strip()))
        for dtype, sizes in _ARRAY.findall(kind)
    ]


def bytes_of(kind: str) -> int:
    """Bytes of a value of this type."""
    total = 0
    for dtype, sizes in shapes_of(kind):
        digits = re.search(r"\d+", dtype)
        bits = _BITS.get(dtype, int(digits[0]) if digits else 8)
        total += -(-prod(sizes) * bits // 8)
    return total


def elements_of(kind: str) -> int:
    """Elements of a value of this type."""
    return sum(prod(sizes) for _, sizes in shapes_of(kind))
