"""Cutting the graph: what is live becomes an output, the graph runs, storages get their buffers."""

from __future__ import annotations

import gc
import time
import weakref
from collections import Counter
from collections.abc import Callable
from operator import itemgetter
from sys import getrefcount
from typing import Any

import torch

from lazytpu.config import config
from lazytpu.diagnosis import events
from lazytpu.diagnosis.diagnose import cause_of
from lazytpu.diagnosis.unlike_scalars import unlike_numbers
from lazytpu.errors import DonatedBufferError, LazyTPUError
from lazytpu.ir.graph import Graph, graph_of
from lazytpu.ir.tree import Node, Value, trace
from lazytpu.location import site
from lazytpu.observe import metrics, regions, step_statistics
from lazytpu.runtime import compiler, executables, index_checks, launch, placement, transfers
from lazytpu.runtime.executable import Executable
from lazytpu.runtime.host.interrupts import uninterrupted
from lazytpu.tensors.storage import Cell, Storage, new_storage, resolve
from lazytpu.tracing import input_origins, record

metrics.add_source("op", lambda: trace.ops + trace.cursor.depth)
_CUT, _WAIT = metrics.timer("cut"), metrics.timer("wait")
# What happens in a cut and is not its own time.
_TIMED_APART = [_WAIT, *map(metrics.timer, ("lower", "compile", "load", "dispatch", "dump"))]


class Plan:
    """What to do at the cut of one path for one set of live values: run ``executable`` on these ``inputs``.

    ``spread`` has for each live value its position among the outputs, None where they are the same in order.
    """

    __slots__ = ("executable", "inputs", "spread")

    def __init__(self, executable: Executable, inputs: tuple[int, ...], spread: tuple[int, ...] | None = None) -> None:
        self.executable, self.inputs, self.spread = executable, inputs, spread


Planner = Callable[[list[Storage], Any], Plan]


def live_storages() -> list[Storage]:
    """Storages that hold a value of this step and that somebody still holds, in order of creation.

    Somebody holds a storage when its reference count is above that of one only the lists here refer to.
    """
    step, pending = trace.recorded_step, trace.pending
    counts = list(map(getrefcount, pending))  # before `zip` refers to them, too
    held = [(s, n) for s, n in zip(pending, counts, strict=True) if n > _UNHELD and s.step == step]
    inputs = Counter(map(id, map(_storage_of, trace.inputs)))  # each entry holds its storage, too
    live = [s for s, n in held if n > _UNHELD + inputs.get(id(s), 0)]
    return list(dict.fromkeys(live))  # a cut in the middle of a write may have left one twice


_storage_of, _buffer_of = itemgetter(0), itemgetter(1)  # of an entry of the list of inputs


def _calibrate() -> int:
    """References to a storage that only ``pending`` holds, as `live_storages` counts them."""
    pending = [new_storage(None)]  # type: ignore[arg-type]
    return next(map(getrefcount, pending))


_UNHELD = _calibrate()


def mark_step(wait: bool = False) -> None:
    """Ends a step: runs everything recorded since the last cut.

    The call returns while the device still computes; reading a tensor waits for it.

    Args:
        wait: wait until the computation has finished.

    Raises:
        LoweringError, CompileError: the graph could not be compiled; every tensor is as it was before.
    """
    cut("mark_step")
    metrics.count("step")
    if wait:
        globals()["wait"]()
    step_statistics.end_step()


@regions.region("cut", detail="reason")
def cut(reason: str, planner: Planner | None = None) -> None:
    """Runs the pending graph.

    Args:
        reason: what forced it, for the report.
        planner: decides what is run for the live storages and the key instead of this module.
    """
    with record.lock:
        trace.refuse_if_closed()
        if trace.apart:
            raise LazyTPUError(
                f"a layer of scan_layers needs the value of a tensor ({reason})",
                at=str(site.line_here()),
                do="use a plain loop over the layers",
            )
        start, apart = time.perf_counter(), sum([series.total for series in _TIMED_APART])
        collecting = gc.isenabled()
        live: list[Storage] = []
        try:
            gc.disable()  # it would run finalizers, and what they record now would be lost
            trace.close()
            live = live_storages()
            if trace.cursor.depth:
                _cut(live, reason, planner)
            else:
                _adopt_inputs(live)
                _next_step()
        except Exception:
            # The error's traceback keeps the frames below.  With the list in them it would keep every live tensor too,
            # and a graph that failed would be run at each later cut although nobody wants its tensors any more.
            live.clear()
            raise
        finally:
            if trace.closed:  # no call here, where an interrupt could leave it closed
                trace.step = trace.recorded_step
                trace.closed = False
            if collecting:
                gc.enable()
            apart -= sum([series.total for series in _TIMED_APART])
            _CUT.add(time.perf_counter() - start + apart)


def _next_step() -> None:
    trace.pending.clear()
    trace.next_step()


def _key(live: list[Storage]) -> Any:
    """Outputs and donated inputs; and True behind them where positions are checked.

    XLA gives the memory of donated inputs to the outputs of their type in order, and copies where it does not suit.  So
    what overwrites an input comes first, in the order of these inputs.
    """
    donated, overwriting = _donated(live) if config.donate else ((), ())
    values = [s.value for s in live if s.value.node is not None]
    if overwriting:
        held = set(values)
        values = [v for v in overwriting if v in held] + values
    key = tuple(dict.fromkeys(values)), donated
    return (*key, True) if config.check_bounds else key


def _cut(live: list[Storage], reason: str, planner: Planner | None) -> None:
    key = _key(live)
    for observe in record.observers:
        observe(key)
    with uninterrupted():
        wanted = key[0] or config.check_bounds and index_checks.checked_nodes(trace.cursor)
        plan = None if not wanted else _plan(*key) if planner is None else planner(live, key)
        buffers = {} if plan is None else _run(plan, key[0])
        _store(live, buffers)
        placement.note_new_ops(trace)
        _next_step()
    metrics.count("cut")
    if reason != "mark_step":
        metrics.count(f"cut: {reason}")
        events.cut(reason, str(site.line_of_read()))
    if trace.nodes > config.max_tree_nodes:
        trace.forget_paths()


def _run(plan: Plan, outputs: tuple[Value, ...]) -> dict[Value, Any]:
    inputs = [trace.inputs[i][1] for i in plan.inputs]
    results = launch.run(plan.executable, inputs, trace.floats, trace.ints, trace.complexes)
    if step_statistics.measuring():
        step_statistics.recorded(trace.cursor, plan.executable.usage)
    found = outputs_of(plan.executable, results, trace.cursor, outputs)
    return dict(zip(outputs, found if plan.spread is None else [found[i] for i in plan.spread], strict=True))


def outputs_of(executable: Executable, results: Any, path: Node, outputs: tuple[Value, ...]) -> Any:
    """The outputs among the results of what was just started; the rest is noted for `wait` and for the next read."""
    remember(results[executable.smallest])
    if not executable.graph.checked:
        return results
    index_checks.note(results[-1], path, outputs)
    return results[:-1]


def _store(live: list[Storage], buffers: dict[Value, Any]) -> None:
    """Gives the live storages the results; storages with one value share its buffer."""
    first: dict[int, Storage] = {}
    _adopt_inputs(live)
    for storage in live:
        value = storage.value
        if value.node is not None:
            buffer = buffers[value]
            storage.buffer, storage.shared = buffer, id(buffer) in first
            first.setdefault(id(buffer), storage).shared = storage.shared
        storage.value, storage.step = None, 0


_last_result: Any = None


def remember(result: Any) -> None:
    """Notes what was started last, for `wait`."""
    global _last_result
    _last_result = result


def _adopt_inputs(live: list[Storage]) -> None:
    """Storages that now hold what another held when the step began share its buffer."""
    for storage in live:
        value = storage.value
        if value.node is None:
            source, buffer, _ = trace.inputs[value.index]
            if source is not storage or storage.buffer is not buffer:
                storage.buffer, storage.shared = buffer, True
                if source.buffer is buffer:
                    source.shared = True


def _donated(live: list[Storage]) -> tuple[tuple[Value, ...], list[Value]]:
    """Input values whose buffers nobody can see after this step, and what overwrites the first of them.

    These are buffers of storages that were overwritten or have died, unless someone else holds them.
    """
    step, inputs = trace.recorded_step, trace.inputs
    kept = {s.value for s in live if s.value.node is None}
    owners = Counter(map(id, map(_buffer_of, inputs)))
    donated, overwriting, others = [], [], []
    for index, (storage, buffer, shared) in enumerate(inputs):
        if shared or storage.shared or owners[id(buffer)] > 1:
            continue
        overwritten = storage.step == step and storage.value.node is not None
        if overwritten or storage.buffer is not buffer:
            value = trace.input_value(index, storage.layout)
            if value not in kept:
                if overwritten:
                    donated.append(value)
                    overwriting.append(storage.value)
                else:
                    others.append(value)
    return (*donated, *others), overwriting


def _plan(outputs: tuple[Value, ...], donated: tuple[Value, ...], checks: bool = False) -> Plan:
    """Finds or compiles what to run for the path that ends at the cursor."""
    node = trace.cursor
    key = (outputs, donated, True) if checks else (outputs, donated)
    reference, inputs = node.executables.get(key, (None, ()))
    known = reference and reference()
    fitting = known and executables.fits(known, trace.floats, trace.ints)
    if fitting and known.settings == compiler.settings():  # else `runtime` has forgotten it, or it is new
        executables.used(known)
        metrics.count("cache_hit")
        return Plan(known, inputs)
    graph = graph_of(node, outputs, donated, index_checks.checked_nodes(node) if checks else ())
    executable = executable_of(graph, key, known if known and not fitting else None)
    inputs = tuple([v.index for v in graph.inputs])
    node.executables[key] = weakref.ref(executable), inputs
    return Plan(executable, inputs)


def executable_of(graph: Graph, key: Any, unfit: Executable | None = None) -> Executable:
    """Finds or compiles a graph of the path that ends at the cursor, and notes the cause.

    Args:
        unfit: one that the step's numbers do not fit (`runtime.fits`); then the executable is for any numbers, else
            for numbers like these.
    """
    executable, compiled = executables.executable_for(graph, None if unfit else (trace.floats, trace.ints))
    if compiled:
        around = input_origins.surroundings()
        cause = cause_of(trace, key, around) if unfit is None else unlike_numbers(unfit.graph, trace.floats, trace.ints)
        events.compiled(executable.graph, cause, executable, around.end, around.names)
    else:
        metrics.count("cache_hit")
    return executable


def pending_graph(tensors: tuple[torch.Tensor, ...] = ()) -> Graph:
    """The graph of what is pending: of the given tensors, or of all live ones.

    Looking changes nothing: what has to be recorded for it (a view that is read) is undone.
    """
    with record.lock:
        if not tensors:
            values = tuple(dict.fromkeys(s.value for s in live_storages() if s.value.node is not None))
            return graph_of(trace.cursor, values)
        mark = trace.mark()
        cells = [record.cell_of(t) for t in tensors]
        try:
            values = tuple(dict.fromkeys([record.load(cell) for cell in cells]))
            return graph_of(trace.cursor, values)
        finally:
            for storage in trace.rewind(mark):
                storage.value, storage.step, storage.dirty = None, 0, 0
            for cell in cells:
                resolve(cell)[0].reads = None


def buffer_of(cell: Cell, reason: str) -> Any:
    """The buffer of a cell's storage, after cutting if its value is pending."""
    with record.lock:
        storage, _ = resolve(cell)
        if storage.step == trace.step and (storage.value.node is not None or storage.buffer is None):
            cut(reason)
        elif storage.step == trace.step and trace.inputs[storage.value.index][1] is not storage.buffer:
            return trace.inputs[storage.value.index][1]
        if storage.buffer is None:
            record.load(storage)
            cut(reason)
        return storage.buffer


def contents_of(cell: Cell, reason: str) -> torch.Tensor:
    """The contents of a cell's storage as a CPU tensor, which the caller copies before anyone else has it.

    Waits without the lock, so that others go on; where one of them has overwritten the storage meanwhile and the
    buffer is gone, the next try keeps them from it.
    """
    step, waited_s = trace.step, _WAIT.total
    try:
        host = transfers.to_host(buffer_of(cell, reason))
    except DonatedBufferError:
        with record.lock:
            host = transfers.to_host(buffer_of(cell, reason))
    events.waited(reason, str(site.line_of_read()), _WAIT.total - waited_s, after_cut=trace.step != step)
    index_checks.raise_if_any()
    return host


def read(tensor: torch.Tensor, reason: str) -> torch.Tensor:
    """The contents of a device tensor as a CPU tensor with the same sizes and strides.

    A view is taken on the host from its storage's contents, so reading one compiles nothing.

    Args:
        tensor: a device tensor.
        reason: the op that reads, for the report.
    """
    cell = record.cell_of(tensor)
    host = contents_of(cell, reason)
    storage, layout = resolve(cell)
    host = host.to(storage.layout.dtype)
    if layout is storage.layout:
        out = torch.empty_strided(layout.size, layout.stride, dtype=layout.dtype)
        return out.copy_(host)
    return _host_view(host, storage.layout, layout)


def _host_view(host: torch.Tensor, root: Any, layout: Any) -> torch.Tensor:
    """A copy of the part of a storage's contents that lies at ``layout``."""
    memory = torch.empty_strided(root.size, root.stride, dtype=root.dtype).copy_(host) if not root.contiguous else host
    part = torch.empty(0, dtype=layout.dtype)
    part.set_(memory.untyped_storage(), layout.offset, layout.size, layout.stride)
    out = torch.empty_strided(*_packed(layout), dtype=layout.dtype).copy_(part)
    if layout.bits & 1:
        out = out.conj_physical()
    return out.neg() if layout.bits & 2 else out


def _packed(layout: Any) -> tuple[Any, Any]:
    """Sizes and strides of a copy of a view, as ``clone`` gives them."""
    meta = torch.empty_strided(layout.size, layout.stride, dtype=layout.dtype, device="meta")
    return layout.size, torch.empty_like(meta).stride()


def wait() -> None:
    """Runs what is pending and waits until the device has finished."""
    step, waited_s = trace.step, _WAIT.total
    cut("wait")
    if _last_result is not None:
        transfers.wait([_last_result])
    events.waited("wait", str(site.line_of_read()), _WAIT.total - waited_s, after_cut=trace.step != step)
    index_checks.raise_if_any()


def forget() -> None:
    """Runs what is pending and drops every path and executable (for tests)."""
    cut("forget")
    trace.forget_paths()
    executables.forget_executables()


def _cut_oversized() -> None:
    cut("max_graph_ops")


record.cut_oversized = _cut_oversized
