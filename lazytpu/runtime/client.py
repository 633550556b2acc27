"""Buffers and executables: everything that touches jax at run time.

A buffer is a ``jax.Array``.  Nothing here changes jax's global configuration: 64-bit types are switched
on around our own tracing, calls and conversions only.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import jax
import numpy as np
import torch

from lazytpu.config import config
from lazytpu.dtypes import to_numpy, to_torch
from lazytpu.errors import CompileError, DonatedBufferError, ExecutionError, LazyTPUError
from lazytpu.ir.graph import Graph
from lazytpu.lowering.lower import function_of, type_of
from lazytpu.lowering.registry import lowering_for, target_platform
from lazytpu.observe import metrics, regions, step_statistics
from lazytpu.passes.uniform_scalars import are_uniform, with_uniform
from lazytpu.runtime import compiler
from lazytpu.runtime.disk_cache import prefetch
from lazytpu.runtime.executable import Executable as Executable
from lazytpu.runtime.executable import donated_bytes, smallest_result
from lazytpu.runtime.host import malloc, mappings
from lazytpu.runtime.host.interrupts import uninterrupted
from lazytpu.runtime.least_recent import LeastRecent

executables = LeastRecent(config.max_executables)  # by `_name`

_SHORTENED_AT = 2  # the run of an executable before which jax has made what it calls


def device() -> jax.Device:
    """The device that runs the graphs: jax's default."""
    return jax.devices()[0]


def platform() -> str:
    """``cpu``, ``gpu`` or ``tpu``."""
    return target_platform()


@regions.region("lower")
def lower(graph: Graph) -> Any:
    """Traces a graph through the rules to StableHLO (a ``jax.stages.Lowered``)."""
    function = function_of(graph)
    positions = [i for part in split_donated(graph, range(len(graph.inputs))) for i in part]

    def step(given: list[Any], kept: list[Any], floats: Any, ints: Any, complexes: Any) -> Any:
        inputs = dict(zip(positions, [*given, *kept], strict=True))
        return function([inputs[i] for i in range(len(positions))], floats, ints, complexes)

    step.__name__ = f"lazytpu_{graph.key[:8]}"
    given, kept, packs = _argument_types(graph)
    with (
        uninterrupted(),
        jax.enable_x64(True),
        jax.default_matmul_precision(config.matmul_precision),
        lowering_for(platform()),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")  # freed early is good enough
        options = compiler.options_for(graph)
        return jax.jit(step, donate_argnums=0, compiler_options=options).trace(given, kept, *packs).lower()


def _argument_types(graph: Graph) -> tuple[list[Any], list[Any], list[Any]]:
    """Types of the inputs that are donated, of the others, and of the arrays of numbers (None where there are none)."""
    packs = zip(graph.counts, (np.float64, np.int64, np.complex128), strict=True)
    given, kept = split_donated(graph, [type_of(v.layout) for v in graph.inputs])
    return given, kept, [jax.ShapeDtypeStruct((n,), dtype) if n else None for n, dtype in packs]


def split_donated(graph: Graph, inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Inputs that are donated, and the others, as the compiled function takes them."""
    donated = set(graph.donated)
    return [inputs[i] for i in graph.donated], [x for i, x in enumerate(inputs) if i not in donated]


def settings() -> dict[str, Any]:
    """The settings that are part of a program, by name."""
    return {"matmul_precision": config.matmul_precision, "lowerings": config.lowerings}


def executable_for(
    graph: Graph, numbers: tuple[Sequence[float], Sequence[int]] | None = None
) -> tuple[Executable, bool]:
    """The executable of a graph, and whether it was compiled, or loaded from disk, just now.

    Args:
        numbers: the step's floats and ints, for an executable that is only for steps like this one (see `fits`);
            without them it is for any.

    Raises:
        LoweringError: a rule failed; names the op and the user's line.
        CompileError: XLA refused the program.
    """
    if numbers is not None:
        graph = with_uniform(graph, *numbers)
    known = executables.find(_name(graph))
    if known is not None:
        return known, False
    graph.verify()
    key = compiler.disk_key(graph)
    found = compiler.from_disk(key, *_argument_types(graph))
    made = _compiled(graph) if found is None else _executable(graph, found[0], load_s=found[1])
    if found is None:
        made.difference = compiler.difference(key)
        compiler.to_disk(key, made.compiled)
    executables.limit = config.max_executables
    executables.keep(_name(graph), made)
    mappings.make_room(executables)
    if platform() == "cpu":
        malloc.keep()
    return made, True


@regions.region("compile")
def _compiled(graph: Graph) -> Executable:
    start = time.perf_counter()
    with compiler.told_of(graph):
        lowered = lower(graph)
        middle = time.perf_counter()
        try:
            compiled = lowered.compile()
        except Exception as error:
            raise _failure(CompileError, "could not compile", graph, error) from error
    end = time.perf_counter()
    metrics.count("compile")
    metrics.add_time("lower", middle - start)
    metrics.add_time("compile", end - middle)
    return _executable(graph, compiled, middle - start, end - middle)


def _executable(
    graph: Graph, compiled: Any, lower_s: float = 0.0, compile_s: float = 0.0, load_s: float = 0.0
) -> Executable:
    return Executable(
        graph, compiled, lower_s, compile_s, smallest_result(graph), donated_bytes(graph), settings(), load_s=load_s
    )


def used(executable: Executable) -> None:
    """Notes that an executable was found without `executable_for`, so that it is not forgotten as unused."""
    if executables.newest is not executable:
        executables.find(_name(executable.graph))


def _name(graph: Graph) -> Any:
    return graph.key, graph.uniform, *settings().values()


def fits(executable: Executable, floats: Sequence[float], ints: Sequence[int]) -> bool:
    """Whether an executable is for steps with these numbers; some need the numbers of a list to be equal."""
    uniform = executable.graph.uniform
    return not uniform or are_uniform(floats, ints, uniform)


def run(
    executable: Executable,
    inputs: Sequence[Any],
    floats: Sequence[float],
    ints: Sequence[int],
    complexes: Sequence[complex],
) -> Sequence[Any]:
    """Starts an executable and returns its results, which may still be computing: its outputs, and the report
    of a ``checked`` graph behind them.

    Args:
        inputs: buffers in the order of ``executable.graph.inputs``; donated ones are gone afterwards.
        floats, ints, complexes: the step's numbers from Python.
    """
    graph = executable.graph
    given, kept = split_donated(graph, inputs)
    results = start(executable, given, kept, packed(graph, floats, ints, complexes))
    return [*results[:-1], *unpacked(graph, results[-1])] if graph.packed else results


def unpacked(graph: Graph, flat: Any) -> list[Any]:
    """The ``packed`` outputs of a graph as arrays of their own, from the one that holds them, which is waited for."""
    host = np.asarray(flat)
    types = [type_of(v.layout) for v in graph.outputs[-graph.packed :]]
    ends = list(accumulate(t.size for t in types))
    parts = [host[end - t.size : end].reshape(t.shape).copy() for t, end in zip(types, ends, strict=True)]
    with uninterrupted(), jax.enable_x64(True):
        found: list[Any] = jax.device_put(parts, device())
    return found


def packed(
    graph: Graph, floats: Sequence[float], ints: Sequence[int], complexes: Sequence[complex]
) -> tuple[Any, Any, Any]:
    """The numbers from Python as the compiled function takes them; None for a kind there is none of.

    An empty array would cost each call a quarter of a microsecond.
    """
    nf, ni, nc = graph.counts
    return (
        np.array(floats[:nf], np.float64) if nf else None,
        np.array(ints[:ni], np.int64) if ni else None,
        np.array(complexes[:nc], np.complex128) if nc else None,
    )


@regions.region("dispatch")
def start(executable: Executable, given: list[Any], kept: list[Any], packs: Sequence[Any]) -> Sequence[Any]:
    """`run` with inputs and numbers arranged already, see `split_donated` and `packed`."""
    usage = executable.usage
    usage.runs += 1
    timed = step_statistics.measuring() and usage.is_due()
    if timed:
        timed = _finished([*given, *kept])
    began = time.perf_counter()
    with jax.enable_x64(True):
        try:
            outputs: Sequence[Any] = executable.compiled(given, kept, *packs)
        except jax.errors.JaxRuntimeError as error:
            raise _failure(ExecutionError, "could not run", executable.graph, error) from error
    metrics.add_time("dispatch", time.perf_counter() - began)
    if timed and _finished(outputs):
        run_s = time.perf_counter() - began
        usage.run_s = run_s if usage.runs <= 2 else 0.5 * (usage.run_s + run_s)
    if usage.run_s:
        metrics.add_time("run", usage.run_s)
    metrics.count("execute")
    metrics.count("donated", len(given))
    metrics.count("donated_bytes", executable.donated_bytes)
    return outputs


def start_ready(executable: Executable, given: list[Any], kept: list[Any], packs: Sequence[Any]) -> Sequence[Any]:
    """`start` where the numbers are buffers already (`resident`): jax needs no setting for them, which costs time."""
    usage = executable.usage
    usage.runs += 1
    if usage.runs == _SHORTENED_AT:
        executable.shorten_call()
    try:
        outputs: Sequence[Any] = executable.call(given, kept, *packs)
    except jax.errors.JaxRuntimeError as error:
        raise _failure(ExecutionError, "could not run", executable.graph, error) from error
    metrics.count("execute")
    if given:
        metrics.count("donated", len(given))
        metrics.count("donated_bytes", executable.donated_bytes)
    return outputs


def flat_call(executable: Executable, arrays: int) -> Any:
    """``executable.flat``, for one that takes nothing over and is given that many arrays, numbers included.

    None where jax has not what it takes.
    """
    if executable.flat is None:
        compiled, tree = executable.compiled, jax.tree_util.tree_structure(((0,) * arrays, {}))
        try:
            executable.flat = compiled._executable.create_cpp_call(compiled._params._replace(in_tree=tree))
        except AttributeError:  # another version of jax
            return None
    return executable.flat


def explained(executable: Executable, error: Exception) -> Exception:
    """What to raise where ``executable.call`` raised."""
    if isinstance(error, jax.errors.JaxRuntimeError):
        return _failure(ExecutionError, "could not run", executable.graph, error)
    return error


def resident(packs: Sequence[Any]) -> tuple[Any, ...]:
    """Numbers from Python as buffers, for `start_ready`."""
    with uninterrupted(), jax.enable_x64(True):
        return tuple([None if p is None else jax.device_put(p, device()) for p in packs])


def _failure(kind: type[LazyTPUError], verb: str, graph: Graph, error: Exception) -> LazyTPUError:
    """The error for a graph XLA refused, with the op whose result is largest: XLA does not say which one failed."""
    sizes = {node: sum(v.layout.nbytes for v in node.values if v) for node in graph.nodes}
    node = max(sizes, key=lambda n: sizes[n])
    memory = "RESOURCE_EXHAUSTED" in str(error)
    return kind(
        f"XLA {verb} a graph of {len(graph.nodes)} ops: {error}",
        at=node.site.describe() if node.site else "",
        given=f"{node.op.name}, whose result {node.value.layout!r} is the largest, {sizes[node]:,} bytes",
        do="use smaller batches, or free tensors before the step" if memory else "see lazytpu.stablehlo_text()",
    )


@regions.region("transfer_in")
def to_device(tensor: torch.Tensor) -> Any:
    """A buffer with the contents of a CPU tensor.

    The contents are copied first: ``jax.device_put`` may alias a numpy buffer on the CPU, and the user is
    free to overwrite the tensor afterwards.
    """
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.dtype is torch.complex32:
        tensor = tensor.to(torch.complex64)
    wanted = to_numpy(tensor.dtype)
    start = time.perf_counter()
    host = np.array(_numpy_view(tensor.contiguous()), copy=True).view(wanted).reshape(tuple(tensor.shape))
    where = device()
    prefetch.start(where)
    with uninterrupted(), jax.enable_x64(True):
        buffer = jax.device_put(host, where)
    seconds = time.perf_counter() - start
    if step_statistics.in_background():
        metrics.add_time("background", seconds)
    metrics.add_transfer("transfer_in", seconds, host.nbytes)
    return buffer


@regions.region("transfer_out")
def to_host(buffer: Any) -> torch.Tensor:
    """The contents of a buffer as a CPU tensor, which shares memory with it where the device is the CPU.

    Waits for the computation.  The caller copies before it lets anyone else have the tensor.  What torch calls
    complex32 comes as complex64.
    """
    try:
        ready([buffer])
        start = time.perf_counter()
        host = np.asarray(buffer)
    except RuntimeError as error:
        if "deleted" in str(error):
            raise DonatedBufferError(
                "the buffer of a tensor was donated and is gone",
                do="donate no array that `to_jax` gave or `from_jax` took; if your jax code does not, it is our bug",
            ) from error
        raise
    metrics.add_transfer("transfer_out", time.perf_counter() - start, host.nbytes)
    dtype = to_torch(host.dtype)
    if host.size == 0:
        return torch.empty(host.shape, dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the memory is read-only, and nobody writes to it
        raw = torch.from_numpy(np.ascontiguousarray(host).reshape(-1).view(np.uint8))
    return raw.view(dtype).reshape(host.shape)


def _numpy_view(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The bytes of a contiguous CPU tensor, whatever its dtype."""
    if not tensor.numel():
        return np.empty(0, np.uint8)
    flat = tensor.as_strided((tensor.numel(),), (1,))  # `view` could keep another stride where there is one element
    return np.from_dlpack(flat.view(torch.uint8))  # `numpy()` would forbid the user to resize the tensor


def wait(buffers: Sequence[Any]) -> None:
    """Waits until the buffers are computed."""
    ready([b for b in buffers if not b.is_deleted()])


@regions.region("wait")
def ready(buffers: Sequence[Any]) -> None:
    """Waits until buffers that are not donated are computed, and adds the time to the timer ``wait``."""
    start = time.perf_counter()
    for buffer in buffers:
        buffer.block_until_ready()
    metrics.add_time("wait", time.perf_counter() - start)


def _finished(buffers: Sequence[Any]) -> bool:
    """Waits for buffers; whether all could be computed (if not, whoever reads one gets the error)."""
    try:
        ready(buffers)
    except jax.errors.JaxRuntimeError:
        return False
    return True


def forget_executables() -> None:
    """Drops every compiled graph (for tests)."""
    executables.clear()


def memory_allocated() -> int:
    """Bytes of buffers alive on the device."""
    return sum(x.nbytes for x in jax.live_arrays() if not x.is_deleted())


def memory_peak() -> int:
    """Most bytes in use at one time, where the platform reports it; else `memory_allocated`."""
    stats = device().memory_stats() or {}
    return int(stats.get("peak_bytes_in_use", memory_allocated()))


def memory_limit() -> int:
    """Bytes of memory of the device, where the platform reports it; else of the machine."""
    stats = device().memory_stats() or {}
    return int(stats.get("bytes_limit", os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")))
