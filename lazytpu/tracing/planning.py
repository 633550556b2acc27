"""What a cut runs: the executable of a path, found on its last node, in memory or on disk, or compiled."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lazytpu.diagnosis import events
from lazytpu.diagnosis.cause import Cause
from lazytpu.diagnosis.diagnose import cause_of, cause_of_scalars
from lazytpu.ir.graph import Graph, graph_of
from lazytpu.ir.sharding import Sharding
from lazytpu.ir.tree import Value, trace
from lazytpu.observe import metrics
from lazytpu.passes.result_shardings import with_shardings
from lazytpu.runtime import compiler, executables, index_checks, tiers
from lazytpu.runtime.executable import Executable
from lazytpu.runtime.least_recent import LeastRecent
from lazytpu.tensors.storage import Storage
from lazytpu.tracing import input_origins

_MOST_INTERPRETED = 1000
# By the last node of a path and what is wanted: what interprets it, and why its graph was new.
_interpreted: LeastRecent[object, tuple[Plan, Cause]] = LeastRecent(_MOST_INTERPRETED)
_causes: LeastRecent[object, Cause] = LeastRecent(_MOST_INTERPRETED)  # by the key of a graph: why it was new
_MOST_NAMED = 5  # graphs that are new from one line on for which the tensor is named: finding the name takes long
_named: Counter[tuple[str, int]] = Counter()


class Plan:
    """What to do at the cut of one path for one set of live values: run ``executable`` on these ``inputs``.

    ``spread`` has for each live value its position among the outputs, None where they are the same in order.
    """

    __slots__ = ("executable", "inputs", "spread")

    def __init__(self, executable: Executable, inputs: tuple[int, ...], spread: tuple[int, ...] | None = None) -> None:
        self.executable, self.inputs, self.spread = executable, inputs, spread


Planner = Callable[[list[Storage], object], Plan]


def plan_of(
    outputs: tuple[Value, ...],
    donated: tuple[Value, ...],
    checks: bool = False,
    wanted: tuple[Sharding | None, ...] | None = None,
) -> Plan:
    """Find or compile what to run for the path that ends at the cursor.

    Args:
        outputs, donated, checks, wanted: the key of the cut, from `liveness.key_of`.
    """
    node = trace.cursor
    key: tuple[object, ...] = (outputs, donated, True) if checks else (outputs, donated)
    if trace.mesh is not None:
        wanted = (None,) * len(outputs) if wanted is None else wanted
        key = (outputs, donated, checks, wanted)
    reference, inputs = node.executables.get(key, (None, ()))
    known: Executable | None = reference() if reference is not None else None
    fitting = known is not None and executables.fits(known, trace.floats, trace.ints)
    spread = tuple(range(len(outputs))) if trace.exchanges else None
    if known is not None and fitting and known.settings == compiler.settings():  # else it is forgotten, or new
        executables.used(known)
        metrics.count("cache_hit")
        return Plan(known, inputs, spread)
    again = _interpreted.find((node, key))
    if again is not None and tiers.interpret_again(again[0].executable.graph):
        events.interpreted(again[0].executable.graph, again[1])
        return again[0]
    checked = index_checks.checked_nodes(node) if checks else ()
    graph = graph_of(node, outputs, donated, checked)
    if trace.exchanges and (unused := set(trace.exchanges) - set(graph.nodes)):
        results = [n.value for n in trace.exchanges if n in unused]
        graph = graph_of(node, (*outputs, *results), donated, checked)
    if trace.mesh is not None and wanted is not None:
        graph = with_shardings(graph, wanted, trace.mesh)
    executable = executable_of(graph, key, None if fitting else known, tiers.interpreted_at_first)
    plan = Plan(executable, tuple([v.index for v in graph.inputs]), spread)
    if executable.interpreted:
        _interpreted.keep((node, key), (plan, _causes[graph.key]))
    else:
        node.executables[key] = weakref.ref(executable), plan.inputs
    return plan


def forget_interpreted() -> None:
    """Forget what interprets which path, because the paths are forgotten."""
    _interpreted.clear()
    _named.clear()


def executable_of(
    graph: Graph,
    key: Any,
    unfit: Executable | None = None,
    instead: Callable[[Graph], Executable | None] = lambda graph: None,
) -> Executable:
    """Find or compile a graph of the path that ends at the cursor, and note the cause.

    Args:
        unfit: one that the step's numbers do not fit (`runtime.fits`); then the executable is for any numbers, else
            for numbers like these.
        instead: makes what runs a graph that is neither in memory nor on disk; None to compile it.
    """
    scalars = None if unfit else (trace.floats, trace.ints)
    executable, compiled = executables.executable_for(graph, scalars, instead=instead)
    if not compiled and not executable.interpreted:
        metrics.count("cache_hit")
        return executable
    context = input_origins.context()
    if executable.interpreted and trace.diverged is not None:
        site = trace.diverged[1].site
        _named[site.file, site.line] += 1
        if _named[site.file, site.line] > _MOST_NAMED:
            context = replace(context, describe=lambda value: "")
    if unfit is not None:
        cause = cause_of_scalars(unfit.graph, trace.floats, trace.ints)
    else:
        known = graph.key in _causes
        cause = _causes.pop(graph.key) if known else cause_of(trace, key, context)
    if compiled:
        events.compiled(executable.graph, cause, executable, context.end)
    else:
        events.interpreted(executable.graph, cause)
        _causes.keep(graph.key, cause)
    return executable
