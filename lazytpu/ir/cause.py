"""Why a graph had to be compiled: where its path parts from the paths that were known, in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lazytpu.ir.site import UNKNOWN, Site
from lazytpu.ir.tree import Node, Trace, Value
from lazytpu.schema import ABSENT


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a graph was compiled.

    Attributes:
        kind: ``first``, ``input``, ``attribute``, ``number``, ``op``, ``longer``, ``live`` or ``donation``.
        text: the cause in words.
        site, other: the line where the paths part, and the line on the known path.
        remedy: what to do about it, empty where nothing is to be done.
    """

    kind: str
    text: str
    site: Site = UNKNOWN
    other: Site = UNKNOWN
    remedy: str = ""


def cause_of(trace: Trace, key: Any) -> Cause:
    """The cause for compiling the path that ends at the cursor for ``key`` (outputs, donated inputs).

    Called before the executable is stored.
    """
    if trace.parted is None:
        return _other_results(trace.cursor, key)
    parent, node = trace.parted
    siblings = [n for n in parent.children.values() if n is not node]
    if siblings:
        return _parted(node, siblings)
    if parent.parent is None:
        return Cause("first", "the first graph", node.site)
    return Cause(
        "longer",
        f"the graph goes on with {node.op.name} where it was cut before, after op {parent.depth}",
        node.site,
        parent.site,
        "cut at the same place in every step (lazytpu.mark_step() once a step)",
    )


def _parted(node: Node, siblings: list[Node]) -> Cause:
    same_op = [s for s in siblings if s.op is node.op]
    if not same_op:
        other = siblings[-1]
        if node.parent is not None and node.parent.parent is None:
            return Cause("op", f"a graph that begins with {node.op.name}", node.site, other.site)
        return Cause(
            "op",
            f"op {node.depth} is {node.op.name}, it was {other.op.name}: Python took another way",
            node.site,
            other.site,
            "nothing in a second step (the first made optimizer state); else keep data out of Python's control flow",
        )
    # the line it came from says more than how much differs; of several, the most recent
    other = min(reversed(same_op), key=lambda s: (s.site != node.site, len(_differences(node, s))))
    for position, new, old in _differences(node, other):
        name = node.op.arguments[position].name
        found = _difference(node, other, name, new, old)
        if found is not None:
            return found
    return Cause("op", f"op {node.depth} {node.op.name} takes other operands", node.site, other.site)


def _differences(a: Node, b: Node) -> list[tuple[int, Any, Any]]:
    return [(i, x, y) for i, (x, y) in enumerate(zip(a.key[1:], b.key[1:], strict=True)) if x is not y and x != y]


def _difference(node: Node, other: Node, name: str, new: Any, old: Any) -> Cause | None:
    where = f"op {node.depth} {node.op.name}, argument {name!r}"
    if isinstance(new, tuple) and isinstance(old, tuple):
        for x, y in zip(new, old, strict=False):
            if isinstance(x, Value) and isinstance(y, Value) and x is not y:
                new, old = x, y
                break
    if isinstance(new, Value) and isinstance(old, Value):
        if new.node is None and old.node is None and new.index == old.index:
            return Cause(
                "input",
                f"{where}: input %p{new.index} was {old.layout.describe()} and is {new.layout.describe()}",
                node.site,
                other.site,
                "keep the shapes of batches the same: drop_last=True, or pad the last batch",
            )
        return Cause("op", f"{where}: another tensor is used here", node.site, other.site)
    if isinstance(new, type) or isinstance(old, type):
        return Cause("number", f"{where}: was {_kind(old)} and is {_kind(new)}", node.site, other.site)
    return Cause(
        "attribute",
        f"{where}: was {_shown(old)} and is {_shown(new)}",
        node.site,
        other.site,
        "a shape or flag is part of the program; keep it the same, or expect one graph for each value",
    )


def _kind(x: Any) -> str:
    return f"a Python {x.__name__}" if isinstance(x, type) else "a tensor" if isinstance(x, Value) else _shown(x)


def _shown(x: Any) -> str:
    if x is ABSENT:
        return "not given"
    if isinstance(x, tuple) and len(x) == 2 and isinstance(x[0], type):
        return repr(x[1])
    return repr(list(x)) if isinstance(x, tuple) else repr(x)


def _other_results(cursor: Node, key: Any) -> Cause:
    outputs, donated = key
    known = list(cursor.executables)
    if not known:
        return Cause("longer", f"the known graph is cut earlier, after op {cursor.depth}", cursor.site)
    for old_outputs, old_donated in known:
        if old_outputs == outputs:
            names = ", ".join(f"%p{v.index}" for v in set(donated) ^ set(old_donated))
            return Cause("donation", f"other inputs may be overwritten: {names}", cursor.site)
    old = set(min(known, key=lambda k: len(set(k[0]) ^ set(outputs)))[0])
    return _live(outputs, old, cursor)


def _live(outputs: tuple[Value, ...], old: set[Value], cursor: Node) -> Cause:
    more = [v for v in outputs if v not in old]
    fewer = [v for v in old if v not in set(outputs)]
    value = (more or fewer)[0]
    verb = "is held at the cut now" if more else "is no longer held at the cut"
    site = value.node.site if value.node is not None else cursor.site
    name = value.node.op.name if value.node is not None else "an input"
    count = len(more) + len(fewer)
    rest = f" (and {count - 1} more)" if count > 1 else ""
    return Cause(
        "live",
        f"the result of {name}, {value.layout!r}, {verb}{rest}",
        site,
        cursor.site,
        "what is kept from a step is computed; keep the same tensors in every step",
    )
