"""Parse HLO text as far as dumps need it: computations, instructions, operands and metadata."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-~]+)(?: \(.*)? \{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-~]+) = ")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|branch_computations|called_computations)=\{?([^,}]+(?:, %[^,}]+)*)"
)
_OP_NAME = re.compile(r'op_name="((?:[^"\\]|\\.)*)"')
_NAME = re.compile(r"%([\w.\-~]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_CONDITION = re.compile(r"\bcondition=%?([\w.\-~]+)")
_COMMENT = re.compile(r"/\*.*?\*/")


@dataclass(slots=True)
class Instruction:
    """One instruction.

    Attributes:
        line: its line in the text, from 1.
        name, opcode: as printed, the name without ``%``.
        operands: names of the operands.
        op_name: of the metadata, empty where XLA made the instruction without saying from what.
        called: computations it applies.
        root: whether it is the result of its computation.
        type: of its result, as printed.
        attributes: what stands behind the operands.
        inside: what stands between the parentheses.
    """

    line: int
    name: str
    opcode: str
    operands: list[str]
    op_name: str
    called: list[str]
    root: bool = False
    type: str = ""
    attributes: str = ""
    inside: str = ""


@dataclass
class Computation:
    """A list of instructions; ``line`` is that of its header."""

    name: str
    line: int
    entry: bool
    instructions: list[Instruction] = field(default_factory=list)

    @cached_property
    def by_name(self) -> dict[str, Instruction]:
        """The instructions by name."""
        return {i.name: i for i in self.instructions}

    @cached_property
    def users(self) -> dict[str, list[Instruction]]:
        """The instructions that take each as an operand."""
        found: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            for name in instruction.operands:
                found.setdefault(name, []).append(instruction)
        return found

    @cached_property
    def root(self) -> Instruction | None:
        """The instruction whose result is that of the computation."""
        return next((i for i in self.instructions if i.root), None)


@dataclass
class Module:
    """A parsed module: its computations by name."""

    computations: dict[str, Computation]

    @cached_property
    def callers(self) -> dict[str, list[tuple[Computation, Instruction]]]:
        """Map each computation to the instructions that apply it, each with its computation."""
        found: dict[str, list[tuple[Computation, Instruction]]] = {}
        for computation, instruction in self.instructions():
            for name in instruction.called:
                found.setdefault(name, []).append((computation, instruction))
        return found

    @cached_property
    def runs(self) -> dict[str, int]:
        """Map each computation to how often it runs in a run of the module, as far as numbers of iterations are known.

        A branch of a condition counts as if it were always taken, a loop without a known end as one iteration.
        """
        found: dict[str, int] = {}

        def times(name: str) -> int:
            if name not in found:
                computation = self.computations[name]
                found[name] = 0  # no computation applies itself
                callers = self.callers.get(name, ())
                found[name] = sum(times(c.name) * self._iterations(i) for c, i in callers) or int(computation.entry)
            return found[name]

        for name in self.computations:
            times(name)
        return found

    def _iterations(self, instruction: Instruction) -> int:
        """Return how often a loop runs: what XLA has noted, or the end of a counter, which begins at 0; else 1."""
        if instruction.opcode != "while":
            return 1
        if found := _TRIPS.search(instruction.attributes):
            return int(found[1])
        condition = _CONDITION.search(instruction.attributes)
        computation = self.computations[condition[1]] if condition else None
        root = None if computation is None else computation.root
        if computation and root and root.opcode == "compare" and "direction=LT" in root.attributes:
            end = computation.by_name[root.operands[1]]
            return int(end.inside) if end.opcode == "constant" and end.inside.isdigit() else 1
        return 1

    def instructions(self) -> Iterator[tuple[Computation, Instruction]]:
        """Yield every instruction with its computation, in the order of the text."""
        for computation in self.computations.values():
            for instruction in computation.instructions:
                yield computation, instruction


def parse(text: str) -> Module:
    """Parse a module in XLA's long or short form."""
    module = Module({})
    current: Computation | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if current is None:
            if match := _HEADER.match(line):
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
    type_, rest = rest[:end], rest[end:].lstrip()
    opcode, _, _ = rest.partition("(")
    close = _balanced(rest, len(opcode))
    inside, attributes = rest[len(opcode) + 1 : close - 1], rest[close:].removeprefix(",").strip()
    name = _OP_NAME.search(attributes)
    called = [c.strip().lstrip("%") for group in _CALLED.findall(attributes) for c in group.split(",")]
    operands = [] if opcode in ("constant", "parameter", "iota") else _operands(inside)
    given = name[1] if name else ""
    return Instruction(number, match[2], opcode, operands, given, called, bool(match[1]), type_, attributes, inside)


def _balanced(text: str, start: int) -> int:
    """Return the index behind the parenthesis that closes the one at ``start``."""
    depth = 0
    for match in re.compile(r'[()]|"(?:[^"\\]|\\.)*"').finditer(text, start):
        depth += (match[0] == "(") - (match[0] == ")")
        if depth == 0 and match[0] in "()":
            return match.end()
    return len(text)


def _operands(inside: str) -> list[str]:
    """Return the names among ``f32[2]{0} %a, (s32[], f32[2]) %b`` or ``%a, /*index=1*/%b`` or ``a, b``."""
    text = _COMMENT.sub("", inside)
    return _NAME.findall(text) if "%" in text else [name.strip() for name in text.split(",") if name.strip()]
