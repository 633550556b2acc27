"""Start executables."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, TypeVar

import jax
import numpy as np

from lazytpu.errors import ExecutionError
from lazytpu.ir.graph import Graph
from lazytpu.lowering.lower import type_of
from lazytpu.observe import metrics, regions, step_statistics
from lazytpu.runtime import client, together
from lazytpu.runtime.client import Buffer, Scalars
from lazytpu.runtime.executable import Executable, failure
from lazytpu.runtime.host import memory
from lazytpu.runtime.host.interrupts import uninterrupted
from lazytpu.runtime.transfers import finished

_T = TypeVar("_T")
_COMPILING = [*map(metrics.timer, ("lower", "compile", "load"))]
_SHORTENED_AT = 2  # the run of an executable before which jax has made what it calls

_GIVING_BACK_S = 0.002  # that a program takes after its results are ready, until its temporaries are free

_large: list[Buffer] = []  # the smallest result of the last program with large temporaries


def run(
    executable: Executable,
    inputs: Sequence[Any],
    floats: Sequence[float],
    ints: Sequence[int],
    complexes: Sequence[complex],
) -> Sequence[Buffer]:
    """Start an executable and return its results, which may still be computing.

    They are its outputs, and behind them the report of a ``checked`` graph.

    Args:
        inputs: buffers in the order of ``executable.graph.inputs``; donated ones are gone afterwards.
        floats, ints, complexes: the step's scalar inputs.
    """
    graph = executable.graph
    donated, retained = split_donated(graph, inputs)
    results = start(executable, donated, retained, scalar_arrays(graph, floats, ints, complexes))
    return [*results[:-1], *split_concatenated(graph, results[-1])] if graph.concatenated else results


def scalar_arrays(
    graph: Graph, floats: Sequence[float], ints: Sequence[int], complexes: Sequence[complex]
) -> tuple[Any, Any, Any]:
    """Return the scalar inputs as the arrays that the compiled function takes; None for a kind there is none of.

    An empty array would cost each call a quarter of a microsecond.
    """
    nf, ni, nc = graph.counts
    return (
        np.array(floats[:nf], np.float64) if nf else None,
        np.array(ints[:ni], np.int64) if ni else None,
        np.array(complexes[:nc], np.complex128) if nc else None,
    )


def split_concatenated(graph: Graph, flat: Any) -> list[Any]:
    """Wait for the array that holds the ``concatenated`` outputs of a graph and return them as arrays of their own."""
    flat.block_until_ready()  # a view of one that failed ends the process
    host = np.asarray(flat)
    types = [type_of(v.layout) for v in graph.outputs[-graph.concatenated :]]
    ends = list(accumulate(t.size for t in types))
    parts = [host[end - t.size : end].reshape(t.shape).copy() for t, end in zip(types, ends, strict=True)]
    with uninterrupted(), jax.enable_x64(True):
        return client.put(parts)


@regions.region("dispatch")
def start(executable: Executable, donated: list[Buffer], retained: list[Buffer], scalars: Scalars) -> Sequence[Buffer]:
    """Start an executable with arguments arranged by `split_donated` and `scalar_arrays`."""
    _make_room(executable)
    usage = executable.usage
    usage.runs += 1
    timed = step_statistics.measuring() and usage.is_due()
    if timed:
        timed = finished([*donated, *retained])
    compiling = sum([series.total for series in _COMPILING]) if executable.interpreted else 0.0  # rules of single ops
    began = time.perf_counter()
    with jax.enable_x64(True):
        try:
            outputs: Sequence[Buffer] = executable.compiled(donated, retained, *scalars)
        except jax.errors.JaxRuntimeError as error:
            raise failure(ExecutionError, "could not run", executable.graph, error) from error
    taken = time.perf_counter() - began
    if executable.interpreted:
        metrics.add_time("interpret", taken - sum([series.total for series in _COMPILING]) + compiling)
    else:
        metrics.add_time("dispatch", taken)
    if timed and finished(outputs):
        run_s = time.perf_counter() - began
        usage.run_s = run_s if usage.runs <= 2 else 0.5 * (usage.run_s + run_s)
    if usage.run_s:
        metrics.add_time("run", usage.run_s)
    metrics.count("execute")
    metrics.count("donated", len(donated))
    metrics.count("donated_bytes", executable.donated_bytes)
    if executable.alone:
        _large[:] = [outputs[executable.smallest]]
    return outputs


def start_ready(
    executable: Executable, donated: list[Buffer], retained: list[Buffer], scalars: Scalars
) -> Sequence[Buffer]:
    """Start an executable whose scalar arrays are on the device already, which spares a setting of jax."""
    _make_room(executable)
    usage = executable.usage
    usage.runs += 1
    if usage.runs == _SHORTENED_AT:
        executable.shorten_call()
    try:
        outputs: Sequence[Buffer] = executable.call(donated, retained, *scalars)
    except jax.errors.JaxRuntimeError as error:
        raise failure(ExecutionError, "could not run", executable.graph, error) from error
    metrics.count("execute")
    if donated:
        metrics.count("donated", len(donated))
        metrics.count("donated_bytes", executable.donated_bytes)
    if executable.alone:
        _large[:] = [outputs[executable.smallest]]
    return outputs


def _make_room(executable: Executable) -> None:
    """Wait until the last program with large temporaries has given them back, where this one has large ones as well.

    The host runs several steps ahead of the device, and each would hold its own: a vision transformer's process took
    1.8 GB instead of 1.4.
    """
    if executable.alone and not all(map(together.is_ready, _large)):
        finished(_large)
        time.sleep(_GIVING_BACK_S)
    if executable.needs:
        ask_for_memory(executable)


def ask_for_memory(executable: Executable) -> None:
    """Raise where the system has less memory than an executable needs, while the donated inputs are still there.

    Raises:
        ExecutionError: names the op of the largest result, and its line.
    """
    if not memory.is_there(executable.needs):
        error = MemoryError(f"RESOURCE_EXHAUSTED: it needs {executable.needs:,} bytes beside its inputs")
        raise failure(ExecutionError, "could not run", executable.graph, error)


def flat_call(executable: Executable, arrays: int) -> object:
    """Return ``executable.flat``, for one that donates nothing and takes that many arrays, scalar arrays included.

    None where this version of jax lacks what it needs, or memory has to be made or asked for first.
    """
    if executable.needs or executable.alone:
        return None
    if executable.flat is None:
        compiled, tree = executable.compiled, jax.tree_util.tree_structure(((0,) * arrays, {}))
        try:
            executable.flat = compiled._executable.create_cpp_call(compiled._params._replace(in_tree=tree))
        except AttributeError:  # another version of jax
            return None
    return executable.flat


def explained(executable: Executable, error: Exception) -> Exception:
    """Return what to raise where ``executable.call`` raised."""
    if isinstance(error, jax.errors.JaxRuntimeError):
        return failure(ExecutionError, "could not run", executable.graph, error)
    return error


def resident(scalars: Scalars) -> tuple[Any, ...]:
    """Put scalar arrays on the device, for `start_ready`."""
    with uninterrupted(), jax.enable_x64(True):
        return tuple([None if p is None else client.put([p])[0] for p in scalars])


def split_donated(graph: Graph, inputs: Sequence[_T]) -> tuple[list[_T], list[_T]]:
    """Return the inputs that are donated, and the others, as the compiled function takes them."""
    donated = set(graph.donated)
    return [inputs[i] for i in graph.donated], [x for i, x in enumerate(inputs) if i not in donated]
