"""Find why a graph has to be compiled: where its path diverges from the known ones, or how it ends otherwise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lazytpu.diagnosis import events
from lazytpu.diagnosis.cause import KINDS, Cause, Context, graph_through
from lazytpu.diagnosis.control_path import decision, of_branch
from lazytpu.diagnosis.divergence import divergence
from lazytpu.ir.graph import Graph
from lazytpu.ir.site import Site
from lazytpu.ir.tree import Node, Number, Trace, Value, operands
from lazytpu.location import source
from lazytpu.passes.uniform_scalars import are_uniform


def cause_of(trace: Trace, key: tuple[object, ...], context: Context) -> Cause:
    """Return the cause for compiling the path that ends at the cursor for ``key`` (outputs, donated inputs, checks).

    Called before the executable is stored.
    """
    if trace.diverged is None:
        return _of_known_path(trace.cursor, key, context)
    parent, node = trace.diverged
    siblings = [n for n in parent.children.values() if n is not node]
    if siblings:
        cause, other = divergence(node, siblings, context)
        return replace(cause, known=graph_through(other))
    if parent.parent is None:
        dropped = events.compiled_before() and not trace.roots  # where there are other trees, they were left for this
        text = "the first graph" + (" since the trace tree was dropped (max_tree_nodes)" if dropped else "")
        return Cause("first", text, node.site)
    return _of_length(parent, node, context, longer=True)


def cause_of_scalars(graph: Graph, floats: Sequence[float], ints: Sequence[int]) -> Cause:
    """Return the cause where a graph compiled for scalar inputs that are all equal is to run with others."""
    kind, start, _ = next(run for run in graph.uniform if not are_uniform(floats, ints, (run,)))
    for node in graph.nodes:
        if any(type(x) is Number and (x.kind, x.index) == (kind, start) for x in operands(node)):
            return Cause("dynamic", f"scalar inputs of {node.op.name} were all equal and now differ", node.site)
    raise AssertionError("a graph without the scalar inputs it is uniform in")


def _of_length(last: Node, following: Node, context: Context, *, longer: bool) -> Cause:
    """Return the cause where only one of two paths goes on with ``following``, after the last op that both have.

    Args:
        longer: whether it is the new one; the other one is cut.
    """
    known = graph_through(last)
    cut = events.end_of(known)
    new, old = (following.site, cut) if longer else (_here(last, context), following.site)
    op = following.op.name
    branch = decision(new, old)
    if branch is None and following.site.stack and following.site.stack[0] in last.site.stack:
        loop = source.comprehension_on(*following.site.stack[0])
        branch = None if loop is None else of_branch(replace(loop, inside=longer))
    if branch is not None:
        at = f"op {following.depth} ({f'{op} instead of a cut' if longer else f'a cut instead of {op}'})"
        return Cause("branch", f"{at}: {branch[0]}", new, old, fix=branch[1], known=known)
    if longer:
        kind, text = "longer", f"goes on with {op} after op {last.depth}, where it was cut before"
    else:
        kind, text = "shorter", f"is cut after op {last.depth}, where it went on with {op} before"
    at_one_line = bool(cut.file) and cut == context.end
    return Cause(kind, text, new, old, fix=KINDS["branch"].fix if at_one_line else "", known=known)


def _here(cursor: Node, context: Context) -> Site:
    """Return the line of this cut: those of a path that is known are of the step that recorded it first."""
    return context.end if context.end.file else cursor.site


def _of_known_path(cursor: Node, key: tuple[Any, ...], context: Context) -> Cause:
    """Return the cause for a path that is known to its end."""
    outputs, donated, *checks = key[:3]
    shardings = key[3:]
    known: list[tuple[Any, ...]] = list(cursor.executables)
    here, number = _here(cursor, context), graph_through(cursor)
    if key in cursor.executables:
        executable = cursor.executables[key][0]()
        if executable is None:
            return Cause("forgotten", "the graph was compiled before and evicted since", here)
        changed = {n: (executable.settings[n], v) for n, v in context.settings.items() if executable.settings[n] != v}
        return _setting(changed, here, executable.usage.number)
    if not known and cursor.children:
        return _of_length(cursor, next(reversed(cursor.children.values())), context, longer=False)
    if not known:
        text = f"the ops up to op {cursor.depth} were recorded before, never compiled: no result was held, or it failed"
        return Cause("unfinished", text, here)
    if any(old[:3] == key[:3] and old[3:] != shardings for old in known):
        return Cause("sharding", "results are to have another sharding", here, known=number)
    if any(old[:2] == (outputs, donated) for old in known):
        return _setting({"check_bounds": (not checks, bool(checks))}, here, number)
    known = [old for old in known if old[2:3] == tuple(checks)] or known
    for old_outputs, old_donated, *_ in known:
        if old_outputs == outputs:
            return _donation(donated, old_donated, here, number, context)
    old = min(known, key=lambda k: len(set(k[0]) ^ set(outputs)))[0]
    return _live(outputs, old, cursor, number, context)


def _setting(changed: dict[str, tuple[object, object]], site: Site, known: int) -> Cause:
    texts = [f"lazytpu.config.{name} was {old!r} and is {new!r}" for name, (old, new) in changed.items()]
    return Cause("setting", ", ".join(texts), site, known=known)


def _donation(donated: Sequence[Value], old: Sequence[Value], site: Site, known: int, context: Context) -> Cause:
    if not context.donate:
        return _setting({"donate": (True, False)}, site, known)
    more, fewer = [v for v in donated if v not in old], [v for v in old if v not in donated]
    value = (more or fewer)[0]
    verb = "can be donated now" if more else "can no longer be donated, something else holds its buffer"
    rest = f" (and {len(more) + len(fewer) - 1} more)" if len(more) + len(fewer) > 1 else ""
    text = f"input %p{value.index}, {value.layout!r}, {verb}{rest}"
    return Cause("donation", text, site, given=context.describe(value), known=known)


def _live(outputs: Sequence[Value], old: Sequence[Value], cursor: Node, known: int, context: Context) -> Cause:
    more, fewer = [v for v in outputs if v not in old], [v for v in old if v not in outputs]
    if not more and not fewer:  # one result in two tensors counts twice
        text = "the same results are held, by more or fewer tensors or in another order"
        return Cause("live", text, cursor.site, known=known)
    value = (more or fewer)[0]
    verb = "is held at the cut now" if more else "is no longer held at the cut"
    name, site = (value.node.op.name, value.node.site) if value.node is not None else ("an input", cursor.site)
    held = context.describe(value) if more else ""
    rest = f" (and {len(more) + len(fewer) - 1} more)" if len(more) + len(fewer) > 1 else ""
    text = f"the result of {name}, {value.layout!r}, {verb}{rest}"
    return Cause("live", text, site, cursor.site, f"held by {held}" if held else "", known=known)
