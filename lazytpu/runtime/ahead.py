"""Compile recorded graphs for a topology that is only described."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from functools import partial
from math import prod

import jax

from lazytpu.errors import CompileError
from lazytpu.ir.graph import Graph
from lazytpu.lowering.target import Topology, compiling_for
from lazytpu.runtime import compiler

_TOO_LARGE = re.compile(r"Used ([\d.]+)([KMGT]?) of ([\d.]+)([KMGT]?) hbm", re.IGNORECASE)
_TEMPORARIES = re.compile(r"\(([\d.]+)([KMGT]?)\) exceeds available HBM \(([\d.]+)([KMGT]?)\)")
_UNTILED = "Couldn't find output tile sizes"
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes on one device.

    Attributes:
        arguments, outputs, aliased, temporaries, code: as XLA counts them; ``aliased`` outputs lie in arguments.
        needed: all of them together.
        limit: what the program may use; 0 where XLA does not say.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int
    needed: int
    limit: int = 0


@dataclass(frozen=True, slots=True)
class Compiled:
    """A graph compiled for a topology.

    Attributes:
        graph: what was compiled.
        text: optimized HLO of one device; empty where the program did not fit.
        memory: bytes on one device.
        fits: whether the memory is enough, as far as the compiler says.
        compile_s: seconds that XLA took.
    """

    graph: Graph
    text: str
    memory: Memory
    fits: bool
    compile_s: float


def compile_ahead(graph: Graph, topology: Topology) -> Compiled:
    """Compile a graph that was recorded for a topology.

    Raises:
        LoweringError: a rule failed.
        CompileError: XLA refused the program, for another reason than its size.
    """
    with compiling_for(topology):
        lowered = compiler.lower(graph)
        start = time.perf_counter()
        try:
            compiled = compiler.compiling(graph, partial(_compiled, lowered))
        except CompileError as error:
            memory = too_large(str(error), argument_bytes(graph))
            if memory is None:
                raise
            return Compiled(graph, "", memory, False, time.perf_counter() - start)
        seconds = time.perf_counter() - start
        return Compiled(graph, str(compiled.as_text()), _memory_of(compiled.memory_analysis()), True, seconds)


def _compiled(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compile; products by cuBLAS where XLA, which has no GPU to try kernels out on, chose one that it cannot make."""
    try:
        return lowered.compile()
    except Exception as error:  # jaxlib's own class, whose place has changed
        if _UNTILED not in str(error):
            raise
        return lowered.compile({"xla_gpu_enable_triton_gemm": False})


def argument_bytes(graph: Graph) -> int:
    """Return the bytes of the parts of a graph's inputs on one device."""
    types = [compiler.input_type(graph, value) for value in graph.inputs]
    return sum(prod(t.sharding.shard_shape(t.shape)) * t.dtype.itemsize for t in types)


def too_large(message: str, arguments: int) -> Memory | None:
    """Return the memory of a program that XLA refused for its size; None where its message says something else.

    Args:
        message: XLA's.
        arguments: bytes of the program's inputs, which one of its messages leaves out.
    """
    used = _TOO_LARGE.search(message)
    found = used or _TEMPORARIES.search(message)
    if found is None:
        return None
    first, limit = (int(float(found[i]) * _UNITS[found[i + 1].upper()]) for i in (1, 3))
    if used is not None:
        return Memory(arguments, 0, 0, max(0, first - arguments), 0, first, limit)
    return Memory(arguments, 0, 0, first, 0, arguments + first, limit)


def _memory_of(stats: object) -> Memory:
    names = ("argument", "output", "alias", "temp", "generated_code")
    arguments, outputs, aliased, temporaries, code = (int(getattr(stats, f"{n}_size_in_bytes", 0)) for n in names)
    needed = arguments + outputs - aliased + temporaries + code
    return Memory(arguments, outputs, aliased, temporaries, code, needed)
