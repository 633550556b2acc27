"""Lower a graph and compile it with XLA."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import cache as remembered
from typing import Any, TypeVar

import jax
import numpy as np

from lazytpu.config import config
from lazytpu.dtypes import HALVES
from lazytpu.errors import CompileError
from lazytpu.ir.graph import Graph
from lazytpu.ir.tree import Value
from lazytpu.lowering import target
from lazytpu.lowering.lower import function_of, type_of
from lazytpu.lowering.registry import lowering_for, target_platform
from lazytpu.lowering.support import shardings
from lazytpu.lowering.support.processes import over
from lazytpu.observe import logs, metrics, regions
from lazytpu.runtime import client, described, processes
from lazytpu.runtime.client import Buffer
from lazytpu.runtime.executable import Executable, donated_bytes, failure, smallest_result
from lazytpu.runtime.host import memory
from lazytpu.runtime.host.interrupts import uninterrupted
from lazytpu.runtime.launch import split_donated

_T = TypeVar("_T")
_LOGGED_AFTER_S = 2.0

# XLA ends the process where the bytes of anything that it makes in between, as wide as 16 an element, pass 2^63.
_MAX_BYTES = 1 << 58

# What XLA may hand to YNNPACK on CPUs, the first of these that the compiler knows.  By default that is reductions too,
# with what they are computed from: some of them have wrong values and some end the process, and those of half precision
# are not rounded (docs/explanation/xla-bugs.md).  Products by themselves are right; so are convolutions, but they take
# up to twice as long as those of Eigen.
_FUSIONS = "xla_cpu_experimental_ynn_fusion_type"
_PRODUCTS = ("LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT", "")
_NONE = ("",)

# How much of a program's temporaries may lie in one block of memory (runtime/host/memory.py).
_BLOCKS = "xla_multiheap_size_constraint_per_heap"


@regions.region("lower")
def lower(graph: Graph) -> Any:
    """Trace a graph through the rules to StableHLO (a ``jax.stages.Lowered``).

    Raises:
        CompileError: a tensor is so large that XLA would end the process.
    """
    _check_sizes(graph)
    function = function_of(graph)
    order = [i for part in split_donated(graph, range(len(graph.inputs))) for i in part]

    def step(donated: list[Buffer], retained: list[Buffer], floats: Any, ints: Any, complexes: Any) -> Any:
        inputs = dict(zip(order, [*donated, *retained], strict=True))
        return function([inputs[i] for i in range(len(order))], floats, ints, complexes)

    def step_on_mesh(
        donated: list[jax.Array], retained: list[jax.Array], *scalars: jax.Array | None
    ) -> tuple[jax.Array, ...]:
        inputs = dict(zip(order, [*donated, *retained], strict=True))
        cropped = [
            inputs[i] if v in graph.parts else shardings.cropped(inputs[i], v.layout.size)
            for i, v in enumerate(graph.inputs)
        ]
        return pad_results(graph, function(cropped, *scalars))

    traced: Callable[..., tuple[jax.Array, ...]] = step if graph.mesh is None else step_on_mesh
    if graph.patterns:
        traced = processes.mapped(graph, step)
    traced.__name__ = f"lazytpu_{graph.key[:8]}"
    donated, retained, scalars = argument_types(graph)
    with (
        uninterrupted(),
        jax.enable_x64(True),
        over(processes.ranks_of(graph)) if graph.patterns else nullcontext(),
        jax.default_matmul_precision(config.matmul_precision),
        lowering_for(client.platform(), on_mesh=graph.mesh is not None),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")  # freed early is good enough
        options = options_for(graph)
        jitted = jax.jit(traced, donate_argnums=0, compiler_options=options, out_shardings=_placed(graph))
        return jitted.trace(donated, retained, *scalars).lower()


def _check_sizes(graph: Graph) -> None:
    largest = max([v.layout.nbytes for node in graph.nodes for v in node.results], default=0)
    if largest > _MAX_BYTES:
        error = MemoryError(f"RESOURCE_EXHAUSTED: a result of {largest:,} bytes")
        raise failure(CompileError, "could not compile", graph, error)


def argument_types(graph: Graph) -> tuple[list[Any], list[Any], list[Any]]:
    """Return the types of the donated inputs, of the others, and of the scalar arrays (None where there are none)."""
    kinds = zip(graph.counts, (np.float64, np.int64, np.complex128), strict=True)
    donated, retained = split_donated(graph, [input_type(graph, v) for v in graph.inputs])
    scalars = [jax.ShapeDtypeStruct((n,), dtype) if n else None for n, dtype in kinds]
    if graph.patterns:
        scalars = [None if x is None else processes.global_type(graph, x) for x in scalars]
    return donated, retained, scalars


def input_type(graph: Graph, value: Value) -> jax.ShapeDtypeStruct:
    """Return the type of the array that an input is given as: on a mesh one that is replicated or padded to parts."""
    plain = type_of(value.layout)
    if graph.patterns:
        return processes.global_type(graph, plain)
    if graph.mesh is None:
        if target.described() is None:
            return plain
        return jax.ShapeDtypeStruct(plain.shape, plain.dtype, sharding=described.one_device())
    if value.sharding is None:
        return jax.ShapeDtypeStruct(plain.shape, plain.dtype, sharding=shardings.replicated(graph.mesh))
    size = value.sharding.padded(plain.shape)
    return jax.ShapeDtypeStruct(size, plain.dtype, sharding=shardings.named(value.sharding))


def pad_results(graph: Graph, results: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """Return the results, those that are to have a sharding padded to its parts."""
    wanted = [*graph.shardings, *[None] * (len(results) - len(graph.shardings))]
    return tuple([x if s is None else shardings.padded(x, s) for x, s in zip(results, wanted, strict=True)])


def _placed(graph: Graph) -> object:
    """Return where results are to lie: what says to jax which devices it is that a graph without inputs is for."""
    if graph.mesh is not None:
        return result_shardings(graph)
    return None if target.described() is None else described.one_device()


def result_shardings(graph: Graph) -> tuple[jax.sharding.NamedSharding | None, ...]:
    """Return the shardings of the results of a graph on a mesh, None where XLA chooses."""
    wanted = graph.shardings or (None,) * len(graph.outputs)
    assert graph.mesh is not None
    report = [shardings.replicated(graph.mesh)] * graph.checked
    return (*[None if s is None else shardings.named(s) for s in wanted], *report)


def options_for(graph: Graph) -> dict[str, object]:
    """Return the compiler's options for a graph: for right values, rounded as they should be, and blocks of memory."""
    if target_platform() != "cpu":
        return {}
    halves = any(v is not None and v.layout.dtype in HALVES for node in graph.nodes for v in node.values)
    fusions = _accepted(_FUSIONS, *(_NONE if halves else _PRODUCTS))
    return {**fusions, **_accepted(_BLOCKS, memory.BLOCK_BYTES)} if memory.reuses_pages() else fusions


@remembered
def _accepted(option: str, *choices: object) -> dict[str, Any]:
    """Return an option with the first of some choices that the compiler knows, else nothing."""
    for choice in choices:
        with suppress(Exception):  # jaxlib's own class, whose place has changed
            options = {option: choice}
            jax.jit(lambda x: x, compiler_options=options).lower(0.0).compile()
            return options
    return {}


def settings() -> dict[str, Any]:
    """Return the settings that are part of a program, by name."""
    topology = target.described()
    name = "" if topology is None else topology.name
    return {"matmul_precision": config.matmul_precision, "lowerings": config.lowerings, "topology": name}


@regions.region("compile")
def compile_graph(graph: Graph, counter: str = "compile") -> Executable:
    """Lower a graph and compile it with XLA; ``counter`` counts it.

    Raises:
        LoweringError: a rule failed; names the op and the user's line.
        CompileError: XLA refused the program.
    """
    start = time.perf_counter()
    with progress_logged(graph):
        lowered = lower(graph)
        middle = time.perf_counter()
        compiled = compiling(graph, lowered.compile)
    return compiled_just_now(graph, compiled, middle - start, time.perf_counter() - middle, counter)


def compiled_just_now(
    graph: Graph, compiled: Any, lower_s: float, compile_s: float, counter: str = "compile"
) -> Executable:
    """Count and time a compilation that has ended, and wrap what it gave."""
    metrics.count(counter)
    metrics.add_time("lower", lower_s)
    metrics.add_time("compile", compile_s)
    return executable_of(graph, compiled, lower_s, compile_s)


def compiling(graph: Graph, compile: Callable[[], _T]) -> _T:
    """Call what gives the compiled program of a graph, and say which graph it was where XLA refuses it."""
    try:
        return compile()
    except Exception as error:
        raise failure(CompileError, "could not compile", graph, error) from error


def executable_of(
    graph: Graph, compiled: Any, lower_s: float = 0.0, compile_s: float = 0.0, **others: Any
) -> Executable:
    """Wrap what XLA compiled, what was loaded from disk, or what runs a graph without either."""
    needs, alone = memory.needed(compiled)
    if graph.patterns:
        compiled = processes.OverProcesses(graph, compiled)
    smallest, donated = smallest_result(graph), donated_bytes(graph)
    return Executable(
        graph, compiled, lower_s, compile_s, smallest, donated, settings(), needs=needs, alone=alone, **others
    )


@contextmanager
def progress_logged(graph: Graph) -> Iterator[None]:
    """Log that a graph is still being compiled, after two seconds and then each time after twice as long."""
    done = threading.Event()
    start = time.perf_counter()

    def log() -> None:
        pause = _LOGGED_AFTER_S
        while not done.wait(pause):
            seconds = time.perf_counter() - start
            first = graph.nodes[0].site if graph.nodes else None
            place = f", the first at {first.describe()}" if first is not None and first.file else ""
            logs.note("compile", "compiling a graph of %d ops%s: %.0f s so far", len(graph.nodes), place, seconds)
            pause = seconds

    logger = threading.Thread(target=log, name="lazytpu-progress", daemon=True) if logs.is_on("compile") else None
    if logger is not None:
        logger.start()
    try:
        yield
    finally:
        done.set()
        if logger is not None:
            logger.join()
