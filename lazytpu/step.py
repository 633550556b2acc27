"""Cutting the graph: what is live becomes an output, the graph runs, storages get their buffers."""

from __future__ import annotations

import gc
import sys
import weakref
from collections import Counter
from typing import Any

import torch

from lazytpu import events, metrics, record, runtime
from lazytpu.config import config
from lazytpu.errors import DonatedBufferError
from lazytpu.interrupts import uninterrupted
from lazytpu.ir import site
from lazytpu.ir.cause import cause_of
from lazytpu.ir.graph import Graph, graph_of
from lazytpu.ir.tree import Value, trace
from lazytpu.storage import Cell, Storage, new_storage, resolve

metrics.add_source("op", lambda: trace.ops + trace.cursor.depth)


class _Plan:
    """What to do at the cut of one path for one set of live values: run ``executable`` on these ``inputs``."""

    __slots__ = ("executable", "inputs")

    def __init__(self, executable: runtime.Executable, inputs: tuple[int, ...]) -> None:
        self.executable, self.inputs = executable, inputs


def live_storages() -> list[Storage]:
    """Storages that hold a value of this step and that somebody still holds, in order of creation.

    Somebody holds a storage when its reference count is above that of one only the lists here refer to.
    """
    step = trace.recorded_step
    counted = [(s, sys.getrefcount(s)) for s in trace.pending if s.step == step]
    held = [(s, n) for s, n in counted if n > _UNHELD]
    if [s for s, n in held if n <= _UNHELD + 2]:  # perhaps only the list of inputs holds it
        inputs = Counter([id(entry[0]) for entry in trace.inputs])
        held = [(s, n) for s, n in held if n > _UNHELD + inputs[id(s)]]
    return list(dict.fromkeys([s for s, _ in held]))  # a cut in the middle of a write may have left one twice


def _calibrate() -> int:
    """References to a storage that only ``pending`` holds, as `live_storages` counts them."""
    pending = [new_storage(None)]  # type: ignore[arg-type]
    return [(s, sys.getrefcount(s)) for s in pending][0][1]


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


def cut(reason: str) -> None:
    """Runs the pending graph.

    Args:
        reason: what forced it, for the report.
    """
    with record.lock:
        trace.refuse_if_closed()
        collecting = gc.isenabled()
        live: list[Storage] = []
        try:
            gc.disable()  # it would run finalizers, and what they record now would be lost
            trace.close()
            live = live_storages()
            if trace.cursor.depth:
                _cut(live, reason)
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


def _next_step() -> None:
    trace.pending.clear()
    trace.next_step()


def plan_pending() -> tuple[_Plan, list[Storage], Any]:
    """What `cut` would run now: the plan, the live storages and the key (outputs, donated inputs)."""
    live = live_storages()
    key = _key(live)
    return _plan(*key), live, key


def _key(live: list[Storage]) -> tuple[tuple[Value, ...], tuple[Value, ...]]:
    outputs = tuple(dict.fromkeys([s.value for s in live if s.value.node is not None]))
    return outputs, _donated(live) if config.donate else ()


def _cut(live: list[Storage], reason: str) -> None:
    outputs, donated = _key(live)
    with uninterrupted():
        plan = _plan(outputs, donated) if outputs else None
        buffers = {} if plan is None else _run(plan, outputs)
        _store(live, buffers)
        _next_step()
    metrics.count("cut")
    if reason != "mark_step":
        metrics.count(f"cut: {reason}")
        events.cut(reason, str(site.line_here()))
    if trace.nodes > config.max_tree_nodes:
        trace.forget_paths()


def _run(plan: _Plan, outputs: tuple[Value, ...]) -> dict[Value, Any]:
    inputs = [trace.inputs[i][1] for i in plan.inputs]
    results = runtime.run(plan.executable, inputs, trace.floats, trace.ints, trace.complexes)
    remember(results[plan.executable.smallest])
    return dict(zip(outputs, results, strict=True))


def _store(live: list[Storage], buffers: dict[Value, Any]) -> None:
    """Gives the live storages the results; storages with one value share its buffer."""
    first: dict[Value, Storage] = {}
    _adopt_inputs(live)
    for storage in live:
        value = storage.value
        if value.node is not None:
            storage.buffer, storage.shared = buffers[value], value in first
            first.setdefault(value, storage).shared = storage.shared
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


def _donated(live: list[Storage]) -> tuple[Value, ...]:
    """Input values whose buffers nobody can see after this step.

    These are buffers of storages that were overwritten or have died, unless someone else holds them.
    """
    step = trace.recorded_step
    kept = {s.value for s in live if s.value.node is None}
    owners: dict[int, int] = {}
    for _, buffer, _ in trace.inputs:
        owners[id(buffer)] = owners.get(id(buffer), 0) + 1
    donated = []
    for index, (storage, buffer, shared) in enumerate(trace.inputs):
        if shared or storage.shared or owners[id(buffer)] > 1:
            continue
        overwritten = storage.step == step and storage.value.node is not None
        replaced = storage.buffer is not buffer
        if overwritten or replaced:
            value = trace.input_value(index, storage.layout)
            if value not in kept:
                donated.append(value)
    return tuple(donated)


def _plan(outputs: tuple[Value, ...], donated: tuple[Value, ...]) -> _Plan:
    """Finds or compiles what to run for the path that ends at the cursor."""
    node, key = trace.cursor, (outputs, donated)
    reference, inputs = node.executables.get(key, (None, ()))
    known = reference and reference()
    if known:  # else `runtime` has forgotten it, or it is new
        runtime.used(known)
        metrics.count("cache_hit")
        return _Plan(known, inputs)
    graph = graph_of(node, outputs, donated)
    executable, compiled = runtime.executable_for(graph)
    cause = cause_of(trace, key) if compiled else None
    inputs = tuple([v.index for v in graph.inputs])
    node.executables[key] = weakref.ref(executable), inputs
    if cause is None:
        metrics.count("cache_hit")
    else:
        events.compiled(graph, cause, executable.lower_s + executable.compile_s, executable)
    return _Plan(executable, inputs)


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
    try:
        return runtime.to_host(buffer_of(cell, reason))
    except DonatedBufferError:
        with record.lock:
            return runtime.to_host(buffer_of(cell, reason))


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
    cut("wait")
    if _last_result is not None:
        runtime.wait([_last_result])


def forget() -> None:
    """Runs what is pending and drops every path and executable (for tests)."""
    cut("forget")
    trace.forget_paths()
    runtime.forget_executables()


def _cut_oversized() -> None:
    cut("max_graph_ops")


record.cut_oversized = _cut_oversized
