"""What instructions of HLO cost: floating point operations and bytes, counted from their shapes.

XLA gives such figures for a whole executable only.  The rules are those of its ``HloCostAnalysis``: a matrix
product of [m,k] by [k,n] is 2mkn operations, any other arithmetic one for each element, and what only moves data is
none.  Bytes are what an instruction reads and writes; inside a fusion nothing goes to memory, so a fusion is counted
as one instruction.  The body of a loop counts as often as it runs, where the text tells how often that is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import log2, prod

from lazytpu.debug.hlo import Computation, Instruction, Module, bytes_of, elements_of, shapes_of

# Opcodes with one operation for each element of the result.
_POINTWISE = set(
    "abs add and atan2 cbrt ceil clamp compare cosine count-leading-zeros divide erf exponential exponential-minus-one "
    "floor imag is-finite log log-plus-one logistic maximum minimum multiply negate not or popcnt power real "
    "remainder round-nearest-afz round-nearest-even rsqrt select shift-left shift-right-arithmetic "
    "shift-right-logical sign sine sqrt stochastic-convert subtract tan tanh xor".split()
)
_POINTWISE.add("complex")
# Opcodes that move nothing: names for what is there already, and calls, whose bodies are counted.
_NO_BYTES = set(
    "parameter constant tuple get-tuple-element bitcast after-all while call conditional opt-barrier add-dependency "
    "partition-id replica-id".split()
)
_CALLS = {"while", "call", "conditional", "fusion", "async-start"}
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


@dataclass(frozen=True, slots=True)
class Visit:
    """An instruction as it runs.

    Attributes:
        instruction: what runs.
        times: how often.
        caller: the instruction that applies its computation; None in the entry.
        fused: whether it is part of a fusion, so that it reads and writes no memory.
    """

    instruction: Instruction
    times: int
    caller: Visit | None
    fused: bool


def visits(module: Module) -> Iterator[Visit]:
    """Every instruction that runs, a computation once for each instruction that applies it."""

    def walk(computation: Computation, times: int, caller: Visit | None, fused: bool) -> Iterator[Visit]:
        for instruction in computation.instructions:
            visit = Visit(instruction, times, caller, fused)
            yield visit
            if instruction.opcode not in _CALLS:
                continue
            trips = trip_count(module, instruction) if instruction.opcode == "while" else 1
            for name in instruction.called:
                if name in module.computations:
                    called = module.computations[name]
                    yield from walk(called, times * trips, visit, fused or instruction.opcode == "fusion")

    return walk(module.entry, 1, None, False)


def trip_count(module: Module, loop: Instruction) -> int:
    """How often a loop runs: as XLA found out, else the constant that its condition compares with, else 1."""
    known = _TRIPS.search(loop.attributes)
    if known:
        return int(known[1])
    match = re.search(r"condition=%?([\w.\-]+)", loop.attributes)
    condition = module.computations.get(match[1]) if match else None
    if condition is None:
        return 1
    by_name = {i.name: i for i in condition.instructions}
    for instruction in condition.instructions:
        if instruction.opcode == "compare" and "direction=LT" in instruction.attributes:
            bound = by_name.get(instruction.operands[1])
            if bound is not None and bound.opcode == "constant" and bound.literal.isdigit():
                return int(bound.literal)
    return 1


class Costs:
    """Counts for the instructions of one module."""

    def __init__(self, module: Module) -> None:
        self._types = {(c.name, i.name): i.type for c, i in module.instructions()}
        self._home = {id(i): c.name for c, i in module.instructions()}

    def operand_types(self, instruction: Instruction) -> list[str]:
        """Types of the operands."""
        home = self._home[id(instruction)]
        return [self._types.get((home, name), "") for name in instruction.operands]

    def flops(self, instruction: Instruction) -> int:
        """Operations of one run of the instruction itself, without the computations it calls."""
        opcode = instruction.opcode
        if opcode in _POINTWISE:
            return elements_of(instruction.type)
        rule = _RULES.get(opcode)
        return rule(instruction, self.operand_types(instruction)) if rule is not None else 0

    def bytes(self, instruction: Instruction) -> int:
        """Bytes that one run of the instruction reads and writes."""
        opcode = instruction.opcode
        if opcode in _NO_BYTES:
            return 0
        result = bytes_of(instruction.type)
        if opcode in ("slice", "dynamic-slice", "gather"):
            return 2 * result
        types = self.operand_types(instruction)
        if opcode == "dynamic-update-slice" and len(types) > 1:
            return 2 * bytes_of(types[1])
        return result + sum(map(bytes_of, types))


def _dims(instruction: Instruction, name: str) -> list[int]:
    match = re.search(rf"{name}={{([\d,]*)}}", instruction.attributes)
    return [int(n) for n in match[1].split(",") if n] if match else []


def _dot(instruction: Instruction, types: list[str]) -> int:
    sizes = shapes_of(types[0])[0][1]
    contracted = prod(sizes[d] for d in _dims(instruction, "lhs_contracting_dims"))
    return 2 * elements_of(instruction.type) * contracted


def _convolution(instruction: Instruction, types: list[str]) -> int:
    labels = re.search(r"dim_labels=\w+_(\w+)->", instruction.attributes)
    kernel = shapes_of(types[1])[0][1]
    features = kernel[labels[1].index("o")] if labels else 1
    return 2 * elements_of(instruction.type) * (prod(kernel) // max(features, 1))


def _window(instruction: Instruction, types: list[str]) -> int:
    size = re.search(r"size=([\dx]+)", instruction.attributes)
    return elements_of(instruction.type) * (prod(map(int, size[1].split("x"))) if size else 1)


def _inputs(instruction: Instruction, types: list[str]) -> int:
    return elements_of(types[0]) if types else 0


def _sort(instruction: Instruction, types: list[str]) -> int:
    count = _inputs(instruction, types)
    sizes = shapes_of(types[0])[0][1] if types else ()
    (along,) = _dims(instruction, "dimensions") or [0]
    return int(count * max(1.0, log2(max(sizes[along], 2)))) if sizes else 0


def _updates(instruction: Instruction, types: list[str]) -> int:
    return elements_of(types[-1]) if types else 0


def _fft(instruction: Instruction, types: list[str]) -> int:
    length = prod(_dims(instruction, "fft_length"))
    return int(5 * elements_of(instruction.type) * max(1.0, log2(max(length, 2))))


def _cubic(instruction: Instruction, types: list[str]) -> int:
    sizes = shapes_of(types[0])[0][1]
    return elements_of(instruction.type) * sizes[-1] if sizes else 0


_RULES: dict[str, Callable[[Instruction, list[str]], int]] = {
    "dot": _dot,
    "convolution": _convolution,
    "reduce": _inputs,
    "reduce-window": _window,
    "select-and-scatter": _inputs,
    "map": _inputs,
    "all-reduce": _inputs,
    "reduce-scatter": _inputs,
    "sort": _sort,
    "scatter": _updates,
    "fft": _fft,
    "cholesky": _cubic,
    "triangular-solve": _cubic,
    "rng": lambda instruction, types: elements_of(instruction.type),
    "rng-bit-generator": lambda instruction, types: elements_of(instruction.type),
}
