"""Cut the graph: what is live becomes an output, the graph runs, storages get their buffers."""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import repeat

from lazytpu.config import config
from lazytpu.diagnosis import events
from lazytpu.diagnosis.events import Usage
from lazytpu.errors import LazyTPUError
from lazytpu.ir.sharding import Sharding
from lazytpu.ir.tree import Node, Value, trace
from lazytpu.location import site
from lazytpu.observe import metrics, regions, step_statistics
from lazytpu.observers import Observer, add, notify
from lazytpu.runtime import index_checks, launch, meshes, placement, transfers
from lazytpu.runtime.client import Buffer
from lazytpu.runtime.executable import Executable
from lazytpu.runtime.host.interrupts import uninterrupted
from lazytpu.tensors.storage import NOTHING, Storage
from lazytpu.tracing import record, shardings_kept
from lazytpu.tracing.liveness import key_of, live_storages
from lazytpu.tracing.planning import Plan, Planner, forget_interpreted, plan_of

# The paths that were run while steps are measured, and the use of their graphs (record_time.py).
recorded: deque[tuple[Node, Usage]] = deque(maxlen=1000)
threads: set[int] = set()
"""The threads that have cut, by their idents."""
_CUT, _WAIT = metrics.timer("cut"), metrics.timer("wait")
# What happens in a cut and is not its own time.
_TIMED_APART = [_WAIT, *map(metrics.timer, ("lower", "compile", "load", "dispatch", "interpret", "dump"))]


@regions.region("cut", detail="reason")
def cut(reason: str, planner: Planner | None = None) -> None:
    """Run the pending graph.

    Args:
        reason: what forced it, for the report.
        planner: decides what is run for the live storages and the key instead of this module.
    """
    threads.add(threading.get_ident())
    with record.lock:
        trace.refuse_if_closed()
        if trace.isolated:
            raise LazyTPUError(
                f"a layer of scan_layers needs the value of a tensor ({reason})",
                at=str(site.line_here()),
                fix="use a plain loop over the layers",
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
                next_step()
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


def next_step() -> None:
    """Forget what is pending and begin a new step."""
    trace.pending.clear()
    trace.next_step()


def _cut(live: list[Storage], reason: str, planner: Planner | None) -> None:
    key = key_of(live)
    notify("graph_cut", key)
    with uninterrupted():
        wanted = key[0] or trace.exchanges or config.check_bounds and index_checks.checked_nodes(trace.cursor)
        plan = None if not wanted else plan_of(*key) if planner is None else planner(live, key)
        buffers = {} if plan is None else run(plan, key[0])
        _store(live, buffers, dict(zip(key[0], key[3], strict=True)) if trace.mesh is not None else {})
        placement.note_new_ops(trace)
        next_step()
    metrics.count("cut")
    if reason != "mark_step":
        metrics.count(f"cut: {reason}")
        events.cut(reason, str(site.line_of_read()))
    if trace.nodes > config.max_tree_nodes:
        trace.forget_paths()
        forget_interpreted()


def run(plan: Plan, outputs: tuple[Value, ...]) -> dict[Value, Buffer]:
    """Run what was planned for the outputs, values at the cursor; return the buffer of each."""
    inputs = [trace.inputs[i][1] for i in plan.inputs]
    if meshes.used:
        inputs = shardings_kept.placed(plan.executable.graph, plan.inputs, inputs)
    results = launch.run(plan.executable, inputs, trace.floats, trace.ints, trace.complexes)
    if step_statistics.measuring():
        recorded.append((trace.cursor, plan.executable.usage))
    found = outputs_of(plan.executable, results, trace.cursor, outputs)
    return dict(zip(outputs, found if plan.spread is None else [found[i] for i in plan.spread], strict=True))


def outputs_of(
    executable: Executable, results: Sequence[Buffer], path: Node, outputs: tuple[Value, ...]
) -> Sequence[Buffer]:
    """Return the outputs among the results of what was just started; note the rest for `wait` and the next read."""
    remember(results[executable.smallest])
    if not executable.graph.checked:
        return results
    index_checks.note(results[-1], path, outputs)
    return results[:-1]


def _store(live: list[Storage], buffers: dict[Value, Buffer], shardings: dict[Value, Sharding | None]) -> None:
    """Give the live storages the results; storages with one value share its buffer.

    Args:
        shardings: those that were wanted, of a step on a mesh.
    """
    _adopt_inputs(live)
    computed = [storage for storage in live if storage.value.node is not None]
    found = [buffers[storage.value] for storage in computed]
    _set(computed, "buffer", found)
    _set(computed, "shared", repeat(False))
    if len({*map(id, found)}) < len(found):
        owners = Counter(map(id, found))
        _set(computed, "shared", [owners[id(buffer)] > 1 for buffer in found])
    if shardings:
        for storage in computed:
            asked = shardings[storage.value]
            if asked is None or asked is not storage.sharding:
                shardings_kept.note_result(storage, asked)
    _set(live, "step", repeat(0))  # first: an interrupt may leave a value behind that is of no step
    _set(live, "value", repeat(NOTHING))


def _set(storages: list[Storage], name: str, values: Iterable[object]) -> None:
    """Set an attribute of storages, in a loop of C."""
    any(map(setattr, storages, repeat(name), values))


class _OpCount(Observer):
    """The counter of recorded ops, which the trace keeps."""

    def counters(self) -> dict[str, int]:
        return {"op": trace.ops + trace.cursor.depth}


add(_OpCount())

_last_result: Buffer | None = None


def remember(result: Buffer) -> None:
    """Note what was started last, for `wait`."""
    global _last_result
    _last_result = result


def wait_for_last() -> None:
    """Wait until the device has finished what was started last."""
    if _last_result is not None:
        transfers.wait([_last_result])


def _adopt_inputs(live: list[Storage]) -> None:
    """Let storages that now hold what another held when the step began share its buffer."""
    for storage in live:
        value = storage.value
        if value.node is None:
            source, buffer, _ = trace.inputs[value.index]
            if source is not storage or storage.buffer is not buffer:
                shardings_kept.take_over(storage, value.index)
                if source.buffer is buffer:
                    source.shared = True
