"""Find where a path diverges from a known one: an argument that differs, or the control path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lazytpu.diagnosis.cause import Cause, Context
from lazytpu.diagnosis.control_path import at_op, of_control_path
from lazytpu.ir.op_schema import ABSENT
from lazytpu.ir.tree import Node, Value
from lazytpu.ir.types import TensorType

_MAX_SHOWN = 4
_FIXES = {  # of an input, by what changed
    "dtype": "convert it to one dtype before the step",
    "memory layout": "give it one memory layout before the step, with contiguous()",
    "dimension 0": "keep the shapes of batches the same: drop_last=True, or pad the last batch",
    "parameter": "none needed if it was replaced on purpose; else assign to it in place (copy_)",
    "values": "its size depends on values: keep all elements and choose with torch.where, or pad it",
}


def divergence(node: Node, siblings: list[Node], context: Context) -> tuple[Cause, Node]:
    """Return the cause for a node that the tree did not have, and the node on a known path that it was compared with.

    Args:
        siblings: the other children of its parent; there is at least one.
    """
    # the line says more than the op, and that more than how much differs; of several, the most recent
    other = min(
        reversed(siblings), key=lambda s: (s.site != node.site, s.op is not node.op, len(_differences(node, s)))
    )
    cause = _of_arguments(node, other, siblings, context)
    if cause is None or node.site != other.site and cause.kind != "mode" and not _is_one_call(node, other, cause):
        cause = of_control_path(node, other)
    return cause, other


def _is_one_call(node: Node, other: Node, cause: Cause) -> bool:
    """Return whether two lines call one module with inputs of other types: of one type, they would share a graph."""
    is_batch = cause.kind == "input" and not cause.given.startswith(("parameter", "buffer", "state"))
    return is_batch and bool(node.site.module) and node.site.module == other.site.module


def _differences(a: Node, b: Node) -> list[tuple[int, object, object]]:
    """Return position, new and old key of each argument that differs."""
    if a.op is not b.op:
        return []
    return [(i, x, y) for i, (x, y) in enumerate(zip(a.key[1:], b.key[1:], strict=True)) if x is not y and x != y]


def _of_arguments(node: Node, other: Node, siblings: list[Node], context: Context) -> Cause | None:
    """Return the cause in the first argument that differs of an op that both paths have here."""
    for position, new, old in _differences(node, other):
        kind, text, given, fix = _difference(node, position, new, old, siblings, context)
        name = node.op.arguments[position].name
        return Cause(kind, f"{at_op(node)}, argument {name!r}: {text}", node.site, other.site, given, fix)
    return None


def _difference(
    node: Node, position: int, new: Any, old: Any, siblings: list[Node], context: Context
) -> tuple[str, str, str, str]:
    """Return kind, text, what is known of the argument, and the fix where it is not that of the kind."""
    if _has_tensors(new) and _has_tensors(old) and len(new) != len(old):
        fix = "pass as many tensors in every step, or one tensor that holds them all, padded"
        return "operand", f"was a list of {len(old)} tensors and is one of {len(new)}", "", fix
    if _has_tensors(new) and _has_tensors(old):
        new, old = next((pair for pair in zip(new, old, strict=True) if pair[0] is not pair[1]), (new, old))
    if isinstance(new, Value) and isinstance(old, Value) and new.node is old.node is None and new.index == old.index:
        return _other_type(new, old, _types_seen(siblings, node, position, new.index), context.describe(new))
    text = f"was {_shown(old)} and is {_shown(new)}"
    if isinstance(new, Value) or isinstance(old, Value):
        return "operand", text, context.describe(new) if isinstance(new, Value) else "", ""
    if isinstance(new, type) and not isinstance(old, type):
        text = f"the constant {_shown(old)} changed and is a scalar input from now on ({new.__name__})"
        return "dynamic", text, "", ""
    if isinstance(new, type) or isinstance(old, type):
        return "number", text, "", ""
    if node.op.arguments[position].name in ("train", "training"):
        return "mode", text, "", ""
    seen = dict.fromkeys(_shown(n.key[position + 1]) for n in [*siblings, node] if n.op is node.op)
    return "attribute", f"{text}, which is part of the program", _seen("values", list(seen)), ""


def _has_tensors(x: object) -> bool:
    return isinstance(x, tuple) and any(isinstance(e, Value) for e in x)


def _other_type(new: Value, old: Value, seen: list[str], described: str) -> tuple[str, str, str, str]:
    """Return what `_difference` does for an input that has another type."""
    if new.layout is old.layout:  # then its sharding is another
        name = described.partition(",")[0] or f"input %p{new.index}"
        return "sharding", f"sharding of {name} was {_placed(old)} and is {_placed(new)}", described, ""
    changed, more = _change(new.layout, old.layout)
    reason = "values" if "computed on the CPU" in described else changed  # by an op whose sizes depend on values
    if described.startswith(("parameter", "buffer", "state")) and changed not in ("dtype", "memory layout"):
        reason = "parameter"
    text = f"input %p{new.index} was {old.layout.describe()} and is {new.layout.describe()}: {changed} changed{more}"
    given = "; ".join(filter(None, (described, _seen("types", seen))))
    return "input", text, given, _FIXES.get(reason, "")


def _placed(value: Value) -> str:
    return "replicated" if value.sharding is None or value.sharding.is_replicated else value.sharding.describe()


def _change(new: TensorType, old: TensorType) -> tuple[str, str]:
    """Return what differs between two types, and from what to what where the types do not say it."""
    if new.dtype != old.dtype:
        return "dtype", ""
    if len(new.size) != len(old.size):
        return "rank", ""
    dims = [str(i) for i, (a, b) in enumerate(zip(new.size, old.size, strict=True)) if a != b]
    if not dims:
        return "memory layout", f", strides were {list(old.stride)} and are {list(new.stride)}"
    return f"dimension{'s' if len(dims) > 1 else ''} {', '.join(dims)}", ""


def _types_seen(siblings: list[Node], node: Node, position: int, index: int) -> list[str]:
    """Return the types that input number ``index`` was seen with at this op, in order."""
    found: dict[str, None] = {}
    for n in [*siblings, node]:
        key = n.key[position + 1] if n.op is node.op else ()
        for x in key if isinstance(key, tuple) else (key,):
            if isinstance(x, Value) and x.node is None and x.index == index:
                found[x.layout.describe()] = None
    return list(found)


def _seen(what: str, shown: Sequence[str]) -> str:
    """Return ``3 types seen here: f32[2], f32[3], f32[5]``; empty for fewer than two."""
    if len(shown) < 2:
        return ""
    return f"{len(shown)} {what} seen here: {'..., ' * (len(shown) > _MAX_SHOWN)}{', '.join(shown[-_MAX_SHOWN:])}"


def _shown(x: object) -> str:
    """Return what stands for an argument in a key, in words."""
    if x is ABSENT or x is None:
        return "not given"
    if isinstance(x, Value):
        made = f"input %p{x.index}" if x.node is None else f"the result of {at_op(x.node)}"
        return f"{made}, {x.layout!r}" + ("" if x.node is None else f" ({x.node.site})")
    if isinstance(x, type):
        return f"a Python {x.__name__}"
    if isinstance(x, tuple) and len(x) == 2 and isinstance(x[0], type):
        return repr(x[1])
    return repr(list(x)) if isinstance(x, tuple) else repr(x)
