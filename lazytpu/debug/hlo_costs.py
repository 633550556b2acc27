"""What a compiled program does on one device: FLOPs of products and convolutions, bytes to and from memory.

XLA's own ``cost_analysis`` counts the body of a loop once; here it counts once an iteration.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod

from lazytpu.debug.hlo import Computation, Instruction, Module
from lazytpu.debug.hlo_types import ArrayType, arrays_of, bits_of

_CONTRACTED = re.compile(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)')
_LABELS = re.compile(r"dim_labels=([\w?]+)_([\w?]+)->([\w?]+)")
_WINDOW = re.compile(r"\bwindow=\{([^}]*)\}")
_GROUPS = re.compile(r"\b(feature|batch)_group_count=(\d+)")
_PRECISION = re.compile(r'operand_precision(?:=\{|":\[")(\w+)')
_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast while conditional call after-all partition-id replica-id "
    "copy-done slice-done async-done async-update all-gather-done all-reduce-done collective-permute-done "
    "optimization-barrier add-dependency domain iota".split()
)
_KERNEL = 'custom_call_target="tpu_custom_call"'  # of Pallas
_LIBRARY = re.compile(r'custom_call_target="__cu(?:blas|dnn\$conv)(\w*)')  # what XLA leaves to NVIDIA's libraries


@dataclass(frozen=True, slots=True)
class Product:
    """A product of matrices or a convolution.

    Attributes:
        flops: of one run of it, a multiplication and an addition as two.
        dtype: of its operands.
        precision: ``default``, ``high`` or ``highest``: into how many products of bfloat16 those of float32 are split.
        runs: how often it runs.
        line: in the text of the module.
    """

    flops: int
    dtype: str
    precision: str
    runs: int
    line: int


def products(module: Module) -> Iterator[Product]:
    """Yield the products and convolutions of a module."""
    for computation in module.computations.values():
        runs = module.runs[computation.name]
        types: Mapping[str, list[ArrayType]] = {}
        for instruction in computation.instructions:
            library = _library(instruction)
            if instruction.opcode not in ("dot", "convolution") and library is None:
                continue
            types = types or {i.name: arrays_of(i.type) for i in computation.instructions}
            result = arrays_of(instruction.type)[0]
            left, right = [_operand(instruction, n, types) for n in range(2)]
            count = _convolution if _LABELS.search(instruction.attributes) else _dot
            precision = _PRECISION.search(instruction.attributes)
            dtype = max((left.dtype, right.dtype), key=bits_of)
            if library == "BackwardFilter":  # cuDNN's gradients have the labels of the convolution that they are of
                right, result = result, right
            elif library == "BackwardInput":
                left, result = result, left
            flops = count(instruction.attributes, left.shape, right.shape, result.shape)
            yield Product(flops, dtype, precision[1].lower() if precision else "default", runs, instruction.line)


def _library(instruction: Instruction) -> str | None:
    """Return which convolution of cuDNN or product of cuBLAS an instruction calls; None where it calls none."""
    found = _LIBRARY.search(instruction.attributes) if instruction.opcode == "custom-call" else None
    return found[1] if found else None


def _operand(instruction: Instruction, position: int, types: Mapping[str, list[ArrayType]]) -> ArrayType:
    written = arrays_of(instruction.inside)  # in the long form of a module each operand has its type
    return written[position] if len(written) > position else types[instruction.operands[position]][0]


def _dot(attributes: str, left: tuple[int, ...], right: tuple[int, ...], result: tuple[int, ...]) -> int:
    found = _CONTRACTED.search(attributes)
    return 2 * prod(result) * prod(left[int(d)] for d in re.findall(r"\d+", found[1])) if found else 2 * prod(result)


def _convolution(attributes: str, left: tuple[int, ...], right: tuple[int, ...], result: tuple[int, ...]) -> int:
    labels = _LABELS.search(attributes)
    assert labels is not None
    window = _WINDOW.search(attributes)
    given = dict(word.split("=") for word in window[1].split()) if window else {}
    groups = {kind: int(n) for kind, n in _GROUPS.findall(attributes)}
    spatial = sorted(c for c in labels[3] if c.isdigit())
    pairs = 1
    for position, label in enumerate(spatial):
        pairs *= _pairs(given, position, left[labels[1].index(label)], result[labels[3].index(label)])
    features, batch = right[labels[2].index("i")], result[labels[3].index("b")]
    total = result[labels[3].index("f")] * features * batch * pairs
    return 2 * total // (groups.get("batch", 1) if groups.get("feature", 1) == 1 else 1)


def _pairs(window: Mapping[str, str], position: int, size: int, result: int) -> int:
    """Return how many pairs of an element of the window and one of the result meet an element of the input.

    Elements that dilation or padding adds are zeros that nobody multiplies.
    """
    taps, stride, low, stretched, spread = (
        int(_at(window, name, position, other).split("_")[0])
        for name, other in (("size", "1"), ("stride", "1"), ("pad", "0_0"), ("lhs_dilate", "1"), ("rhs_dilate", "1"))
    )
    found = 0
    for tap in range(taps):
        offset = tap * spread - low
        first = max(0, -(offset // stride))  # the smallest result whose place is not before the input
        last = min(result - 1, ((size - 1) * stretched - offset) // stride)
        if stretched == 1:
            found += max(0, last - first + 1)
        else:
            found += sum((offset + stride * at) % stretched == 0 for at in range(first, last + 1))
    return found


def _at(window: Mapping[str, str], name: str, position: int, otherwise: str) -> str:
    return window[name].split("x")[position] if name in window else otherwise


def kernels(module: Module) -> int:
    """Return how many Pallas kernels a run of a module starts, whose FLOPs nobody counts."""
    return sum(module.runs[computation.name] for computation, i in module.instructions() if _is_kernel(i))


def _is_kernel(instruction: Instruction) -> bool:
    return instruction.opcode == "custom-call" and _KERNEL in instruction.attributes


def memory_bytes(module: Module) -> int:
    """Return the bytes that a run reads from and writes to the memory of the device.

    A fusion reads its operands and writes its results, of an operand that it only takes slices of the slices, and so
    does a kernel of Pallas or a library, once.  What stays in a memory inside the chip is left out, and so are other
    custom calls.
    """
    total = 0
    inner = {name for _, i in module.instructions() if i.opcode == "fusion" or _is_small(i) for name in i.called}
    for computation in module.computations.values():
        runs = module.runs[computation.name]
        if computation.name in inner or not runs:
            continue
        types = {i.name: arrays_of(i.type) for i in computation.instructions}
        total += runs * sum(_moved(i, types, module) for i in computation.instructions if i.opcode not in _FREE)
    return total


def _is_small(instruction: Instruction) -> bool:
    """Return whether an instruction applies a computation to single elements."""
    return instruction.opcode.startswith(("reduce", "scatter", "sort", "map", "select-and-scatter", "all-reduce"))


def _moved(instruction: Instruction, types: Mapping[str, list[ArrayType]], module: Module) -> int:
    results = arrays_of(instruction.type)
    if _library(instruction) is not None:
        results = results[:1]  # without the room that the library works in
    elif instruction.opcode == "custom-call" and not _is_kernel(instruction):
        return 0
    if instruction.opcode in ("copy-start", "slice-start", "async-start"):
        return sum(_outside(x) for x in results[:2])
    if instruction.opcode in ("dynamic-slice", "slice", "gather"):
        return 2 * sum(map(_outside, results))
    if instruction.opcode == "dynamic-update-slice":
        return 2 * sum(map(_outside, types.get(instruction.operands[1], ())))
    called = [module.computations[name] for name in instruction.called if name in module.computations]
    if instruction.opcode == "fusion" and called:
        return _of_fusion(instruction, called[0], types)
    read = sum(_outside(x) for name in instruction.operands for x in types.get(name, ()))
    return read + sum(map(_outside, results))


def _of_fusion(instruction: Instruction, body: Computation, types: Mapping[str, list[ArrayType]]) -> int:
    inside = body.by_name
    parameters = {int(i.inside): i for i in body.instructions if i.opcode == "parameter"}
    total = 0
    overwritten = set()
    for position, name in enumerate(instruction.operands):
        whole = sum(map(_outside, types.get(name, ())))
        found = body.users.get(parameters[position].name, []) if position in parameters else []
        parts = [_part_used(user, parameters[position].name, inside) for user in found]
        if whole and found and all(part is not None for part in parts):
            total += min(whole, sum(part or 0 for part in parts))
            overwritten |= {i.name for i in found if i.opcode == "dynamic-update-slice"}
        else:
            total += whole
    roots = [body.root] if body.root else []
    written = [inside[n] for n in roots[0].operands if n in inside] if roots and roots[0].opcode == "tuple" else roots
    for root, result in zip(written, arrays_of(instruction.type), strict=False):
        if root.opcode == "dynamic-update-slice" and root.name in overwritten:
            total += sum(x.nbytes for x in arrays_of(inside[root.operands[1]].type)) if result.space == 0 else 0
        else:
            total += _outside(result)
    return total


def _part_used(user: Instruction, name: str, inside: Mapping[str, Instruction]) -> int | None:
    """Return the bytes that an instruction reads of an operand; None for all of them."""
    if user.opcode in ("dynamic-slice", "slice", "gather") and user.operands[0] == name:
        return sum(x.nbytes for x in arrays_of(user.type))
    if user.opcode == "dynamic-update-slice" and user.operands[0] == name:
        return 0
    return None


def _outside(x: ArrayType) -> int:
    return x.nbytes if x.space == 0 else 0
