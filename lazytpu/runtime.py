"""Buffers and executables: everything that touches jax at run time.

A buffer is a ``jax.Array``.  Nothing here changes jax's global configuration: 64-bit types are switched
on around our own tracing, calls and conversions only.
"""

from __future__ import annotations

import math
import os
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch

from lazytpu import metrics
from lazytpu.config import config
from lazytpu.dtypes import to_numpy, to_torch
from lazytpu.errors import CompileError, DonatedBufferError, ExecutionError, LazyTPUError
from lazytpu.interrupts import uninterrupted
from lazytpu.ir.graph import Graph
from lazytpu.ir.tree import LeastRecent
from lazytpu.lowering.lower import function_of, type_of
from lazytpu.lowering.registry import lowering_for, target_platform


@dataclass(slots=True, weakref_slot=True)
class Executable:
    """A graph compiled for the device.

    Attributes:
        graph: what was compiled.
        compiled: jax's executable; called with (inputs, floats, ints, complexes).
        lower_s, compile_s: seconds spent in our rules and jax's tracing, and in XLA.
        smallest: position of the smallest output, for `step.wait` to hold on to.
    """

    graph: Graph
    compiled: Any
    lower_s: float
    compile_s: float
    smallest: int


_executables = LeastRecent(config.max_executables)

# Each kernel of an executable on the CPU takes memory mappings, and Linux gives a process a limited number
# (vm.max_map_count, 65,530 by default).  Past it LLVM can compile nothing any more.  So the mappings are counted
# after every few compiles, and executables are forgotten when too many are in use.
_COUNT_EVERY = 4
_MAPPINGS_SHARE = 0.5
_LEAST_KEPT = 8


def _smallest(graph: Graph) -> int:
    sizes = [math.prod(v.layout.size) * v.layout.dtype.itemsize for v in graph.outputs]
    return sizes.index(min(sizes))


def device() -> jax.Device:
    """The device that runs the graphs: jax's default."""
    return jax.devices()[0]


def platform() -> str:
    """``cpu``, ``gpu`` or ``tpu``."""
    return target_platform()


def lower(graph: Graph) -> Any:
    """Traces a graph through the rules to StableHLO (a ``jax.stages.Lowered``)."""
    function = function_of(graph)
    donate = set(graph.donated)
    types = [type_of(v.layout) for v in graph.inputs]

    def step(given: list[Any], kept: list[Any], floats: Any, ints: Any, complexes: Any) -> Any:
        sources = iter(given), iter(kept)
        inputs = [next(sources[0] if i in donate else sources[1]) for i in range(len(types))]
        return function(inputs, floats, ints, complexes)

    step.__name__ = f"lazytpu_{graph.key[:8]}"
    given, kept = split_donated(graph, types)
    packs = [
        jax.ShapeDtypeStruct((n,), d) for n, d in zip(graph.counts, (np.float64, np.int64, np.complex128), strict=True)
    ]
    with (
        uninterrupted(),
        jax.enable_x64(True),
        jax.default_matmul_precision(config.matmul_precision),
        lowering_for(platform()),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")  # freed early is good enough
        return jax.jit(step, donate_argnums=0).trace(given, kept, *packs).lower()


def split_donated(graph: Graph, inputs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Inputs that are donated, and the others, as the compiled function takes them."""
    donated = set(graph.donated)
    return [inputs[i] for i in graph.donated], [x for i, x in enumerate(inputs) if i not in donated]


def executable_for(graph: Graph) -> tuple[Executable, bool]:
    """The executable of a graph, and whether it was compiled just now.

    Raises:
        LoweringError: a rule failed; names the op and the user's line.
        CompileError: XLA refused the program.
    """
    known = _executables.find(graph.key)
    if known is not None:
        return known, False
    graph.verify()
    start = time.perf_counter()
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
    made = Executable(graph, compiled, middle - start, end - middle, _smallest(graph))
    _executables.limit = config.max_executables
    _executables.keep(graph.key, made)
    if metrics.counter("compile") % _COUNT_EVERY == 0:
        _forget_for_mappings()
    return made, True


def _forget_for_mappings() -> None:
    """Forgets the executables that were not used for longest, while they take too many memory mappings."""
    limit = _mappings_limit() * _MAPPINGS_SHARE
    while len(_executables) > _LEAST_KEPT and _mappings() > limit:
        for _ in range(max(1, len(_executables) // 4)):
            _executables.popitem(last=False)
            metrics.count("executables_forgotten")


def _mappings() -> int:
    """Memory mappings of this process; 0 where the system does not say."""
    try:
        with open("/proc/self/maps", "rb") as maps:
            return maps.read().count(b"\n")
    except OSError:
        return 0


@cache
def _mappings_limit() -> int:
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        return sys.maxsize


def used(executable: Executable) -> None:
    """Notes that an executable was found without `executable_for`, so that it is not forgotten as unused."""
    _executables.find(executable.graph.key)


def run(
    executable: Executable,
    inputs: Sequence[Any],
    floats: Sequence[float],
    ints: Sequence[int],
    complexes: Sequence[complex],
) -> Sequence[Any]:
    """Starts an executable and returns its outputs, which may still be computing.

    Args:
        inputs: buffers in the order of ``executable.graph.inputs``; donated ones are gone afterwards.
        floats, ints, complexes: the step's numbers from Python.
    """
    graph = executable.graph
    given, kept = split_donated(graph, inputs)
    nf, ni, nc = graph.counts
    with jax.enable_x64(True):
        packs = (
            np.array(floats[:nf], np.float64),
            np.array(ints[:ni], np.int64),
            np.array(complexes[:nc], np.complex128),
        )
        try:
            outputs: Sequence[Any] = executable.compiled(given, kept, *packs)
        except jax.errors.JaxRuntimeError as error:
            raise _failure(ExecutionError, "could not run", graph, error) from error
    metrics.count("execute")
    return outputs


def _failure(kind: type[LazyTPUError], verb: str, graph: Graph, error: Exception) -> LazyTPUError:
    """The error for a graph XLA refused, with the op whose result is largest: XLA does not say which one failed."""
    sizes = {
        node: sum(type_of(v.layout).size * v.layout.dtype.itemsize for v in node.values if v) for node in graph.nodes
    }
    node = max(sizes, key=lambda n: sizes[n])
    memory = "RESOURCE_EXHAUSTED" in str(error)
    return kind(
        f"XLA {verb} a graph of {len(graph.nodes)} ops: {error}",
        at=node.site.describe() if node.site else "",
        given=f"{node.op.name}, whose result {node.value.layout!r} is the largest, {sizes[node]:,} bytes",
        do="use smaller batches, or free tensors before the step" if memory else "see lazytpu.stablehlo_text()",
    )


def to_device(tensor: torch.Tensor) -> Any:
    """A buffer with the contents of a CPU tensor.

    The contents are copied first: ``jax.device_put`` may alias a numpy buffer on the CPU, and the user is
    free to overwrite the tensor afterwards.
    """
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.dtype is torch.complex32:
        tensor = tensor.to(torch.complex64)
    wanted = to_numpy(tensor.dtype)
    host = np.array(_numpy_view(tensor.contiguous()), copy=True).view(wanted).reshape(tuple(tensor.shape))
    metrics.count("transfer_in")
    metrics.count("transfer_in_bytes", host.nbytes)
    with uninterrupted(), jax.enable_x64(True):
        return jax.device_put(host, device())


def to_host(buffer: Any) -> torch.Tensor:
    """The contents of a buffer as a CPU tensor, which shares memory with it where the device is the CPU.

    Waits for the computation.  The caller copies before it lets anyone else have the tensor.  What torch calls
    complex32 comes as complex64.
    """
    start = time.perf_counter()
    try:
        host = np.asarray(buffer)
    except RuntimeError as error:
        if "deleted" in str(error):
            raise DonatedBufferError("a donated buffer was read; this is a bug of lazytpu") from error
        raise
    metrics.add_time("wait", time.perf_counter() - start)
    metrics.count("transfer_out")
    metrics.count("transfer_out_bytes", host.nbytes)
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
    start = time.perf_counter()
    jax.block_until_ready([b for b in buffers if not b.is_deleted()])
    metrics.add_time("wait", time.perf_counter() - start)


def forget_executables() -> None:
    """Drops every compiled graph (for tests)."""
    _executables.clear()


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
