"""Trace a line of StableHLO or HLO back to the op of the IR that it came from.

While graphs are dumped the scope of each op carries its index (``Net/head/aten.addmm%12``, see
`lowering.lower.scope_name`), and XLA keeps the scopes as ``op_name``.  An instruction that XLA adds without a name
(a copy, a tuple, a parameter of a fusion) belongs to the ops of its operands, or else to those of its users.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from lazytpu.debug.hlo import Computation, Instruction, Module
from lazytpu.ir.graph import Graph
from lazytpu.ir.printer import node_text, number_name
from lazytpu.lowering.loop_bodies import LOOP
from lazytpu.lowering.lower import scope_name

_T = TypeVar("_T")
_INDEX = re.compile(r"%(\d+)(?=[/;]|$)")
_LOCATION = re.compile(r"^(#loc\d*) = loc\((.*)\)$")
_LOCATION_USE = re.compile(r" ?loc\((#loc\d*|\"(?:[^\"\\]|\\.)*\"|unknown)\)")
_FUNCTION = re.compile(r"^\s*func\.func \w+ @([\w.$\-]+)\(")
_CALL = re.compile(r"\bcall @([\w.$\-]+)\(")
_RESULT = re.compile(r"\s*(%[\w$]+)(?::\d+)? = ")
_NAME = re.compile(r"%[\w$]+")

# What more ops share (a zero that a thousand ops begin with, a function that all of them call) is linked to the first
# ones: lists of all would make a file of many times the size of the program.
MAX_OPS = 16
_PARAMETER = re.compile(r"^(donated|retained)\[(\d+)\]|^(floats|ints|complexes)\b")


class Names:
    """Finds the ops that an ``op_name`` speaks of."""

    def __init__(self, graph: Graph) -> None:
        self._scopes: dict[str, list[int]] = {}
        for index, node in enumerate(graph.nodes):
            self._scopes.setdefault(scope_name(node.op, node.site), []).append(index)
        self._count = len(graph.nodes)
        donated = set(graph.donated)
        names = [graph.names[v] for v in graph.inputs]
        self._parameters = {
            "donated": [names[i] for i in graph.donated],
            "retained": [name for i, name in enumerate(names) if i not in donated],
        }
        self._scalars: dict[str, list[str]] = {"floats": [], "ints": [], "complexes": []}
        for number in graph.numbers:
            array = {"f": "floats", "i": "ints", "c": "complexes"}[number.kind]
            self._scalars[array].append(number_name(number))

    def ops(self, op_name: str) -> list[int]:
        """Return the indices of the ops; none for a name that is not of ours."""
        found: dict[int, None] = {}
        for name in op_name.split(";"):
            match = _INDEX.search(name)
            if match and int(match[1]) < self._count:
                found[int(match[1])] = None
            elif not match:
                found |= dict.fromkeys(self._by_scope(name))
        return list(found)

    def _by_scope(self, name: str) -> list[int]:
        """Return the ops of this module path and name, for an executable that was compiled without indices."""
        parts = name.split("/")[1:]
        inside = [i for i, part in enumerate(parts) if part == LOOP.name]
        starts = range(inside[-1] + 1, len(parts)) if inside else [0]  # what jax calls a loop stands before its ops
        for start in starts:
            for end in range(len(parts), start, -1):
                found = self._scopes.get("/".join(parts[start:end]))
                if found:
                    return found[:MAX_OPS]
        return []

    def inputs(self, op_name: str) -> list[str]:
        """Return the names of the inputs, or scalar inputs, that a parameter of the entry holds."""
        match = _PARAMETER.match(op_name)
        if not match:
            return []
        return self._scalars[match[3]] if match[3] else self._parameters[match[1]][int(match[2]) :][:1]


@dataclass(slots=True)
class Origin:
    """Where an instruction comes from.

    Attributes:
        ops: indices of ops of the IR.
        inputs: names of inputs of the IR, for a parameter of the entry.
        how: ``metadata``, ``call`` (from what applies the computation), ``operand`` or ``user`` (from its
            neighbours), ``input``, ``result`` (the tuple of all results) or ``unknown``.
    """

    ops: list[int] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    how: str = "unknown"


def origins(module: Module, names: Names) -> dict[int, Origin]:
    """Map the line of each instruction to its origin."""
    found: dict[int, Origin] = {}
    done: set[str] = set()

    def visit(computation: Computation) -> None:
        if computation.name in done:
            return
        done.add(computation.name)
        callers = module.callers.get(computation.name, [])
        for caller, _ in callers:
            visit(caller)
        above = _first(op for _, i in callers for op in found.get(i.line, Origin()).ops)
        for instruction in computation.instructions:
            found[instruction.line] = _named(instruction, names, above, computation.entry)
        _neighbours(computation, found)
        if above:
            for instruction in computation.instructions:
                if found[instruction.line].how == "unknown":
                    found[instruction.line] = Origin(above, how="call")

    for computation in reversed(module.computations.values()):
        visit(computation)
    return found


def _named(instruction: Instruction, names: Names, above: list[int], entry: bool) -> Origin:
    if entry and instruction.opcode == "parameter":
        return Origin(inputs=names.inputs(instruction.op_name), how="input")
    if entry and instruction.root and instruction.opcode == "tuple":
        return Origin(how="result")
    ops = names.ops(instruction.op_name) if instruction.op_name else []
    if ops:
        return Origin(ops, how="metadata")
    inputs = names.inputs(instruction.op_name) if instruction.op_name else []
    if inputs:  # a copy of an input that took over its name
        return Origin(inputs=inputs, how="input")
    return Origin(above, how="call") if instruction.op_name and above else Origin()


def _neighbours(computation: Computation, found: dict[int, Origin]) -> None:
    """Give an instruction without a name the origin of its operands, going down, or of its users, going up.

    The tuple that a loop begins with holds inputs too: it and its parts belong to the loop.
    """
    by_name = computation.by_name
    for instruction in computation.instructions:
        if found[instruction.line].how == "unknown" and (instruction.opcode != "tuple" or instruction.root):
            near = [found[by_name[n].line] for n in instruction.operands if n in by_name]
            _take(instruction, near, "operand", found)
    for instruction in reversed(computation.instructions):
        if found[instruction.line].how == "unknown":
            near = [found[u.line] for u in computation.users.get(instruction.name, ())]
            _take(instruction, [o for o in near if o.how != "result"], "user", found)


def _take(instruction: Instruction, near: list[Origin], how: str, found: dict[int, Origin]) -> None:
    ops = _first(op for origin in near for op in origin.ops)
    inputs = [] if ops else _first(name for origin in near for name in origin.inputs)
    if ops or inputs:
        found[instruction.line] = Origin(ops, inputs, how)


def _first(found: Iterable[_T]) -> list[_T]:
    """Return the first `MAX_OPS` distinct ones."""
    return list(islice(dict.fromkeys(found), MAX_OPS))


def ir_lines(graph: Graph) -> list[list[int]]:
    """Return the ops of each line of ``ir.txt``; a body inside an op takes several lines."""
    lines: list[list[int]] = [[]]
    for index, node in enumerate(graph.nodes):
        lines += [[index]] * (node_text(node, graph.names).count("\n") + 1)
    return lines


def without_location(line: str) -> str:
    """Return a line of StableHLO without its location."""
    return _LOCATION_USE.sub("", line)


def stablehlo_lines(text: str, names: Names) -> list[list[int]]:
    """Return the ops of each line of a StableHLO text with locations."""
    lines = text.splitlines()
    locations = {m[1]: m[2] for m in map(_LOCATION.match, lines) if m}
    found: list[list[int]] = []
    function, functions = "", []
    called: dict[str, list[tuple[str, list[int]]]] = {}
    for line in lines:
        if line.startswith("#loc"):
            function = ""
        start = _FUNCTION.match(line)
        function = start[1] if start else function
        functions.append(function)
        uses = _LOCATION_USE.findall(line)
        ops = names.ops(_name_of(uses[-1], locations)) if uses and not start else []
        found.append(ops)
        for callee in _CALL.findall(line):
            called.setdefault(callee, []).append((function, ops))
    _give_constants(lines, found)
    inherited = {name: _callers_ops(name, called) for name in called}
    return [ops or inherited.get(f, []) for ops, f in zip(found, functions, strict=True)]


def _give_constants(lines: list[str], found: list[list[int]]) -> None:
    """Link constants, which have no name of ours, to their first user."""
    first_use: dict[str, list[int]] = {}
    for i in reversed(range(len(lines))):
        made = _RESULT.match(lines[i])
        if made and not found[i] and "stablehlo.constant" in lines[i]:
            found[i] = first_use.get(made[1], [])
        if made:
            first_use.pop(made[1], None)
        for name in _NAME.findall(lines[i][made.end() :] if made else lines[i]) if found[i] else ():
            first_use[name] = found[i]


def _callers_ops(name: str, called: dict[str, list[tuple[str, list[int]]]]) -> list[int]:
    ops: dict[int, None] = {}
    waiting, seen = [name], {name}
    while waiting and len(ops) < MAX_OPS:
        for caller, own in called.get(waiting.pop(), ()):
            ops |= dict.fromkeys(own)
            if not own and caller not in seen:
                seen.add(caller)
                waiting.append(caller)
    return list(ops)[:MAX_OPS]


def _name_of(use: str, locations: dict[str, str]) -> str:
    """Return the op_name of a location: the first string that its chain of locations leads to."""
    for _ in range(20):
        if use.startswith('"'):
            return use[1 : use.index('"', 1)]
        inner = re.search(r"#loc\d*", use)
        if inner is None or (use == inner[0] and use not in locations):
            return ""
        use = locations.get(inner[0], "")
    return ""
