"""Finds why a graph has to be compiled: where its path parts from the known ones, or how it ends otherwise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lazytpu.diagnosis.cause import Cause, Surroundings
from lazytpu.diagnosis.control_path import Fork, what_left_out, what_parted, what_went_on
from lazytpu.diagnosis.divergence import parted
from lazytpu.ir.tree import Node, Trace, Value
from lazytpu.location.site import Site


def cause_of(trace: Trace, key: Any, around: Surroundings) -> Cause:
    """The cause for compiling the path that ends at the cursor for ``key`` (outputs, donated inputs, checks).

    Called before the executable is stored.
    """
    if trace.parted is None:
        return _other_results(trace.cursor, key, around)
    parent, node = trace.parted
    siblings = [n for n in parent.children.values() if n is not node]
    if siblings:
        cause, other = parted(node, siblings, around)
        return replace(cause, known=around.graph_through(other))
    if parent.parent is None:
        dropped = around.compiled and not trace.roots  # where there are other trees, they were left for this one
        text = "the first graph" + (" since the trace tree was dropped (max_tree_nodes)" if dropped else "")
        return Cause("first", text, node.site)
    known = around.graph_through(parent)
    cut = around.end_of(known)
    left_out = what_left_out(parent.site, node.site, cut, now=True)
    if cut.file and cut == around.end:
        way = _deciding(what_parted(node.site, cut), left_out) or what_went_on(parent.site, node.site, now=True)
        text = f"op {node.depth}, {node.op.name} before the cut: {way.text}"
        return Cause("branch", text, node.site, cut, fix=way.fix, known=known)
    return _other_length(
        "longer",
        f"the graph goes on with {node.op.name} where it was cut before, after op {parent.depth}",
        f"op {node.depth}, {node.op.name} instead of a cut",
        left_out,
        node.site,
        cut,
        known,
    )


def _other_length(kind: str, text: str, parted: str, decides: Fork | None, new: Site, old: Site, known: int) -> Cause:
    """The cause where only one of two graphs goes on: a statement that decides it, or cuts at two places.

    Args:
        kind, text: for cuts at two places.
        parted: the text, up to the statement that decides it.
        decides: that statement, where it is not found from the two lines.
        new, old: the line of the next op for the one that goes on, that of the cut for the other one.
    """
    way = _deciding(what_parted(new, old), decides)
    if way is not None:
        return Cause("branch", f"{parted}: {way.text}", new, old, fix=way.fix, known=known)
    return Cause(kind, text, new, old, fix="cut at the same place in every step, once", known=known)


def _deciding(way: Fork, otherwise: Fork | None) -> Fork | None:
    """The one of two that names a statement."""
    return way if way.found else otherwise


def _other_results(cursor: Node, key: Any, around: Surroundings) -> Cause:
    """The cause for a path that is known to its end."""
    outputs, donated, *checks = key
    known = list(cursor.executables)
    if not known:
        return _other_end(cursor, around)
    if key in cursor.executables:
        return _gone_or_other_settings(cursor, cursor.executables[key][0](), around)
    number = around.graph_through(cursor)
    if any(old[:2] == (outputs, donated) for old in known):
        was, now = (False, True) if checks else (True, False)
        return _setting({"check_bounds": (was, now)}, cursor, around, number)
    known = [old for old in known if old[2:] == tuple(checks)] or known
    for old_outputs, old_donated, *_ in known:
        if old_outputs == outputs:
            return _donation(donated, old_donated, cursor, around, number)
    old = min(known, key=lambda k: len(set(k[0]) ^ set(outputs)))[0]
    return _live(outputs, old, cursor, around, number)


def _other_end(cursor: Node, around: Surroundings) -> Cause:
    if not cursor.children:
        text = (
            f"the ops up to op {cursor.depth} were recorded before, but never compiled: nothing was held, or it failed"
        )
        return Cause("unfinished", text, _now(cursor, around))
    following = next(reversed(cursor.children.values()))
    known = around.graph_through(cursor)
    left_out = what_left_out(cursor.site, following.site, around.end, now=False)
    if around.end.file and around.end == around.end_of(known):
        found = _deciding(what_parted(around.end, following.site), left_out)
        way = found or what_went_on(cursor.site, following.site, now=False)
        text = f"op {following.depth}, a cut instead of {following.op.name}: {way.text}"
        return Cause("branch", text, around.end, following.site, fix=way.fix, known=known)
    return _other_length(
        "shorter",
        f"the graph ends after op {cursor.depth} {cursor.op.name}, where it went on with {following.op.name} before",
        f"op {following.depth}, a cut instead of {following.op.name}",
        left_out,
        _now(cursor, around),
        following.site,
        known,
    )


def _gone_or_other_settings(cursor: Node, executable: Any, around: Surroundings) -> Cause:
    if executable is None:
        return Cause(
            "forgotten",
            "the graph was compiled before and forgotten since",
            _now(cursor, around),
            fix="raise lazytpu.config.max_executables, or compile fewer different graphs",
        )
    settings = around.settings or {}
    changed = {n: (executable.settings[n], v) for n, v in settings.items() if executable.settings[n] != v}
    return _setting(changed, cursor, around, around.number_of(executable))


def _now(cursor: Node, around: Surroundings) -> Site:
    """The line of this cut: those of a path that is known are of the step that recorded it first."""
    return around.end if around.end.file else cursor.site


def _setting(changed: dict[str, tuple[Any, Any]], cursor: Node, around: Surroundings, known: int) -> Cause:
    texts = [f"lazytpu.config.{name} was {old!r} and is {new!r}" for name, (old, new) in changed.items()]
    site = _now(cursor, around)
    return Cause("setting", ", ".join(texts), site, fix="nothing: the graph is kept for each setting", known=known)


def _donation(donated: Any, old: Any, cursor: Node, around: Surroundings, known: int) -> Cause:
    if not around.donate:
        return _setting({"donate": (True, False)}, cursor, around, known)
    more, fewer = [v for v in donated if v not in old], [v for v in old if v not in donated]
    value = (more or fewer)[0]
    verb = "may be overwritten now" if more else "may not be overwritten any more: something else holds it"
    names = ", ".join(f"%p{v.index}" for v in [*more, *fewer])
    return Cause(
        "donation",
        f"other inputs may be overwritten ({names}): input %p{value.index}, {value.layout!r}, {verb}",
        _now(cursor, around),
        given=around.describe(value),
        fix="share its memory (copy_, to_jax, dlpack) in every step or in none",
        known=known,
    )


def _without(values: tuple[Value, ...], others: set[Value]) -> list[Value]:
    return [v for v in values if v not in others]


def _live(outputs: tuple[Value, ...], old: tuple[Value, ...], cursor: Node, around: Surroundings, known: int) -> Cause:
    more, fewer = _without(outputs, set(old)), _without(old, set(outputs))
    if not more and not fewer:  # one result in two tensors counts twice
        text = "the same results are held, by more or fewer tensors or in another order"
        return Cause("live", text, cursor.site, fix="keep the same tensors in every step", known=known)
    value = (more or fewer)[0]
    verb = "is held at the cut now" if more else "is no longer held at the cut"
    name = value.node.op.name if value.node is not None else "an input"
    held = around.describe(value) if more else ""
    count = len(more) + len(fewer)
    rest = f" (and {count - 1} more)" if count > 1 else ""
    return Cause(
        "live",
        f"the result of {name}, {value.layout!r}, {verb}{rest}",
        value.node.site if value.node is not None else cursor.site,
        cursor.site,
        f"held by {held}" if held else "",
        "what is kept from a step is computed; keep the same tensors in every step",
        known,
    )
