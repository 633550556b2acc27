"""Where a path parts from a known one: an argument that differs, or Python's control flow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lazytpu.diagnosis import control_path
from lazytpu.diagnosis.cause import Cause, Surroundings
from lazytpu.diagnosis.operand_changes import Otherwise, base_of, is_view, taken_otherwise
from lazytpu.ir.op_schema import ABSENT
from lazytpu.ir.tree import Node, Value
from lazytpu.ir.types import TensorType
from lazytpu.location import source
from lazytpu.location.site import Site

_MAX_SHOWN = 4
_OF_DATA = "its size depends on values: keep all elements and choose with torch.where, or pad it"
_MAKES_STATE = tuple(f"aten.{name}" for name in ("zeros", "full", "empty", "ones", "new_", "clone"))
_OTHER_GRADIENTS = control_path.Fork(
    "the backward pass computes another gradient here: autograd's graph is another, or gone through in another order",
    "nothing in a second step, where gradients of gradients may take another order; else keep what requires gradients",
)


def parted(node: Node, siblings: list[Node], around: Surroundings) -> tuple[Cause, Node]:
    """The cause for a node that the tree did not have, and the node on a known path that it was compared with.

    Args:
        siblings: the other children of its parent; there is at least one.
    """
    # the line it came from says more than the op, and that more than how much differs; of several, the most recent
    other = min(
        reversed(siblings), key=lambda s: (s.site != node.site, s.op is not node.op, len(_differences(node, s)))
    )
    cause = _of_arguments(node, other, siblings, around) if other.op is node.op else None
    if cause is None or cause.kind == "operand":
        for sibling in reversed(siblings) if is_view(node) or is_view(other) else ():
            otherwise = taken_otherwise(node, sibling)
            found = otherwise and _of_taking(otherwise, around)
            if found:
                return found, sibling
    if cause is None or node.site != other.site and cause.kind != "mode" and not _calls_alike(node, other, cause):
        cause = _of_control_flow(node, other, around)
    return cause, other


def _of_taking(found: Otherwise, around: Surroundings) -> Cause | None:
    """The cause where an op takes one tensor otherwise, seen through the views that were recorded for it."""
    node, other, new, old = found.node, found.other, found.new, found.old
    if new is None or old is None:
        return _more_or_fewer(node, other, found.argument, new, old, around)
    changed = _change(new.layout, old.layout)
    base, was = base_of(new), base_of(old)
    if base.node is not was.node and (base.node is None or was.node is None):
        return None
    if new.layout.same_as(old.layout) or base.node is not None and not _is_relaid(new.layout, old.layout):
        return None
    described = around.describe(base)
    shown = f"{_view_of(old, was)} and is {_view_of(new, base)}"
    return Cause(
        "input",
        f"op {node.depth} {node.op.name}, argument {found.argument!r}: was {shown}: {changed}",
        node.site,
        other.site,
        described,
        _remedy_for_input(changed, described),
    )


def _view_of(value: Value, base: Value) -> str:
    """``f32[2,4]{1,2}, a view of input %p0``."""
    made = "" if value is base else ", a view of " + (f"input %p{base.index}" if base.node is None else _named(base))
    return f"{value.layout.describe()}{made}"


def _is_relaid(new: TensorType, old: TensorType) -> bool:
    """Whether layouts of the same sizes and dtype lie otherwise in memory."""
    return (new.size, new.dtype) == (old.size, old.dtype) and new.stride != old.stride


def _more_or_fewer(
    node: Node, other: Node, argument: str, new: Value | None, old: Value | None, around: Surroundings
) -> Cause:
    """The cause where an op has a tensor that it did not have, or the other way round."""
    name = around.describe(base_of(new)) if new is not None else ""
    if old is not None and base_of(old).node is None:
        name = around.name_of(around.graph_through(other), base_of(old).index)
    value = new or old
    assert value is not None
    tensor = f"{name}, {value.layout!r}" if name else _named(value)
    what = name.strip("`").rpartition(".")[2] if name.startswith(("parameter", "buffer")) else repr(argument)
    told = f"it has no {what} now; it had {tensor}" if new is None else f"it has {tensor}, now; it had no {what}"
    return Cause(
        "operand",
        f"op {node.depth}, {_instead(node, other)}: {told}",
        node.site,
        other.site,
        fix="nothing, if a layer was replaced on purpose: one graph for each is kept",
    )


def _calls_alike(node: Node, other: Node, cause: Cause) -> bool:
    """Whether two lines call one module with tensors of other types: of one type, they would share a graph."""
    is_batch = cause.kind == "input" and not cause.given.startswith(("parameter", "buffer", "state"))
    return is_batch and bool(node.site.module) and node.site.module == other.site.module


def _of_arguments(node: Node, other: Node, siblings: list[Node], around: Surroundings) -> Cause | None:
    """The cause in the arguments of an op that both paths have here."""
    for position, new, old in _differences(node, other):
        found = _difference(node, other, position, new, old, siblings, around)
        if found is not None:
            return found
    return None


def _of_control_flow(node: Node, other: Node, around: Surroundings) -> Cause:
    """The cause where the ops of the two paths come from other places, or are others."""
    switched = control_path.mode_switch(node.site, other.site) or _dropout_switch(node, other)
    if switched:
        return Cause(
            "mode",
            f"op {node.depth}, {_instead(node, other)}: {switched}",
            node.site,
            other.site,
            fix="nothing: one graph for train() and one for eval() are kept",
        )
    switched = control_path.flag_switch(node.site, other.site)
    if switched:
        return Cause(
            "flag",
            f"op {node.depth}, {_instead(node, other)}: {switched}",
            node.site,
            other.site,
            fix="nothing: one graph for each is kept",
        )
    if node.site.adds_up != other.site.adds_up:
        added = "is added to the one that is there, where there was none before"
        new = "is the first, where it was added to another before"
        return Cause(
            "gradient",
            f"op {node.depth}, {_instead(node, other)}: a gradient {added if node.site.adds_up else new}",
            node.site,
            other.site,
            fix="nothing if gradients are accumulated; else optimizer.zero_grad() before each backward()",
        )
    way = control_path.what_parted(node.site, other.site)
    begins_elsewhere = node.depth == 1 and (around.resumed or node.site != other.site)
    if begins_elsewhere and not _decides(way, node.site, other.site):
        after = ", after a cut in the middle of a step" if around.resumed else ""
        return Cause("start", f"a graph that begins with {node.op.name}{after}", node.site, other.site)
    if not way.found:
        way = _inside_torch(node, other) or way
    text = f"op {node.depth}, {_instead(node, other)}: {way.text}"
    return Cause("branch", text, node.site, other.site, fix=way.fix)


def _decides(way: control_path.Fork, new: Site, old: Site) -> bool:
    """Whether a statement decides how a graph begins: one that stands before one of the lines has been left behind."""
    return way.found and (new.file != old.file or way.line <= min(new.line, old.line))


def _inside_torch(node: Node, other: Node) -> control_path.Fork | None:
    """What sent torch another way, where the user's own lines do not tell."""
    hooked = control_path.hook(node.site, other.site)
    if hooked:
        return control_path.Fork(hooked, "nothing, if it is there in every step from now on")
    if node.site.backward and other.site.backward:
        return _OTHER_GRADIENTS
    if not node.site.stack or node.site.stack[:1] != other.site.stack[:1]:
        return None
    where = f"{node.site} took another control path inside torch"
    of_optimizer = ".step(" in source.code_of(*node.site.stack[0])
    if of_optimizer and (node.op.name.startswith(_MAKES_STATE) or other.op.name.startswith(_MAKES_STATE)):
        return control_path.Fork(
            f"{where}: the first optimizer step allocates its state",
            "none needed, later steps reuse this graph",
        )
    called = control_path.other_caller(node.site, other.site)
    if not of_optimizer:
        why = "what requires a gradient, or an argument that is no tensor, decides"
        why = f"{called}: what it is given, or what requires a gradient, decides" if called else f": {why}"
        return control_path.Fork(f"{where}{why}", "nothing, if there are few ways: each is kept")
    which = f"{called}: it is another optimizer, " if called else ": "
    return control_path.Fork(
        f"{where}{which}other parameters have gradients, or the optimizer's settings are others",
        "give the same parameters gradients in every step: zero_grad(set_to_none=False) gives zeros for none",
    )


def _dropout_switch(node: Node, other: Node) -> str:
    """Dropout records nothing in eval mode, so another module's op stands in its place."""
    new, old = "dropout" in node.op.name, "dropout" in other.op.name
    if new == old:
        return ""
    where = (node if new else other).site.module
    return f"dropout{' of ' if where else ''}{where} is {'on' if new else 'off'} now"


def _instead(node: Node, other: Node) -> str:
    return node.op.name if node.op is other.op else f"{node.op.name} instead of {other.op.name}"


def _differences(a: Node, b: Node) -> list[tuple[int, Any, Any]]:
    if a.op is not b.op:
        return []
    return [(i, x, y) for i, (x, y) in enumerate(zip(a.key[1:], b.key[1:], strict=True)) if x is not y and x != y]


def _difference(
    node: Node, other: Node, position: int, new: Any, old: Any, siblings: list[Node], around: Surroundings
) -> Cause | None:
    name = node.op.arguments[position].name
    if (new is None or new is ABSENT) and isinstance(old, Value):
        return _more_or_fewer(node, other, name, None, old, around)
    if (old is None or old is ABSENT) and isinstance(new, Value):
        return _more_or_fewer(node, other, name, new, None, around)
    where = f"op {node.depth} {node.op.name}, argument {name!r}"
    if isinstance(new, tuple) and isinstance(old, tuple):
        for x, y in zip(new, old, strict=False):
            if isinstance(x, Value) and isinstance(y, Value) and x is not y:
                new, old = x, y
                break
    if isinstance(new, Value) and isinstance(old, Value):
        return _other_value(node, other, where, new, old, _input_types(siblings, node, position, new), around)
    if isinstance(new, type) and not isinstance(old, (type, Value)):
        return Cause(
            "promoted",
            f"{where}: was the constant {_shown(old)}, changed, and is an input from now on ({new.__name__})",
            node.site,
            other.site,
            fix="nothing: other values of it compile nothing any more",
        )
    if isinstance(new, type) or isinstance(old, type):
        return Cause(
            "number",
            f"{where}: was {_kind(old)} and is {_kind(new)}",
            node.site,
            other.site,
            fix="give it the same kind in every step: 1.0, not 1",
        )
    if name in ("train", "training") and isinstance(new, bool):
        return Cause(
            "mode",
            f"{where}: was {old} and is {new}: the module or the call went from {_mode(old)} to {_mode(new)} mode",
            node.site,
            other.site,
            fix="nothing: one graph for train() and one for eval() are kept",
        )
    if _is_list_of_tensors(new) and _is_list_of_tensors(old):
        return Cause(
            "operand",
            f"{where}: was a list of {len(old)} tensors and is one of {len(new)}",
            node.site,
            other.site,
            fix="give it as many tensors in every step, or one tensor that holds them all, padded",
        )
    seen = list(dict.fromkeys(_shown(n.key[position + 1]) for n in [*siblings, node] if n.op is node.op))
    return Cause(
        "attribute",
        f"{where}: was {_shown(old)} and is {_shown(new)}, which is part of the program",
        node.site,
        other.site,
        _seen(len(seen), "value", seen),
        "keep it the same, or expect one graph for each value: it decides shapes or selects the formula",
    )


def _is_list_of_tensors(x: Any) -> bool:
    return isinstance(x, tuple) and any(isinstance(e, Value) for e in x)


def _mode(training: Any) -> str:
    return "train" if training else "eval"


def _input_types(siblings: list[Node], node: Node, position: int, value: Value) -> list[TensorType]:
    """The types that input number ``value.index`` was seen with at this op, in order."""
    found: dict[TensorType, None] = {}
    for n in [*siblings, node]:
        if n.op is node.op:
            key = n.key[position + 1]
            for x in key if isinstance(key, tuple) else (key,):
                if isinstance(x, Value) and x.node is None and x.index == value.index:
                    found[x.layout] = None
    return list(found)


def _other_value(
    node: Node, other: Node, where: str, new: Value, old: Value, seen: list[TensorType], around: Surroundings
) -> Cause:
    described = around.describe(new)
    if new.node is None and old.node is None and new.index == old.index:
        changed = _change(new.layout, old.layout)
        of_data = "computed on the CPU" in described  # by an op whose sizes depend on values
        return Cause(
            "input",
            f"{where}: input %p{new.index} was {old.layout.describe()} and is {new.layout.describe()}: {changed}",
            node.site,
            other.site,
            "; ".join(filter(None, (described, _seen(len(seen), "type", [lay.describe() for lay in seen])))),
            _OF_DATA if of_data else _remedy_for_input(changed, described),
        )
    return Cause(
        "operand",
        f"{where}: was {_named(old)} and is {_named(new)}",
        node.site,
        other.site,
        described,
        "use the same tensors in every step; make one that is only there from the second step on before the first",
    )


def _named(value: Value) -> str:
    if value.node is None:
        return f"input %p{value.index}, {value.layout!r}"
    return f"the result of op {value.node.depth} {value.node.op.name}, {value.layout!r} ({value.node.site})"


def _change(new: TensorType, old: TensorType) -> str:
    if new.dtype != old.dtype:
        return "its dtype changed"
    if len(new.size) != len(old.size):
        return f"it has {len(new.size)} dimensions, it had {len(old.size)}"
    dims = [i for i, (a, b) in enumerate(zip(new.size, old.size, strict=True)) if a != b]
    if not dims:
        strides = f"strides {list(old.stride)} before, {list(new.stride)} now"
        return f"its memory layout changed: {strides}, the same shape and dtype"
    return f"its dimension {dims[0]} changed" if len(dims) == 1 else f"its dimensions {_listed(dims)} changed"


def _listed(items: Sequence[Any]) -> str:
    return " and ".join(filter(None, (", ".join(map(str, items[:-1])), str(items[-1]))))


def _remedy_for_input(changed: str, described: str) -> str:
    if changed == "its dtype changed":
        return "convert it to one dtype before the step"
    if "layout" in changed:
        return "give it one memory layout before the step, with contiguous()"
    if described.startswith(("parameter", "buffer", "state")):
        return "nothing, if it was replaced on purpose; else assign to it in place (copy_)"
    if changed == "its dimension 0 changed":
        return "keep the shapes of batches the same: drop_last=True, or pad the last batch"
    return "pad it to one of a few sizes, and leave the padding out of the result"


def _seen(n: int, what: str, shown: Sequence[str]) -> str:
    if n < 2:
        return ""
    latest = ", ".join(shown[-_MAX_SHOWN:])
    return f"{what} {n} of {n} seen here: {'..., ' if n > _MAX_SHOWN else ''}{latest}"


def _kind(x: Any) -> str:
    if isinstance(x, type):
        return f"a Python {x.__name__}"
    return f"a tensor, {x.layout!r}" if isinstance(x, Value) else _shown(x)


def _shown(x: Any) -> str:
    if x is ABSENT:
        return "not given"
    if isinstance(x, Value):
        return repr(x.layout)
    if isinstance(x, tuple) and len(x) == 2 and isinstance(x[0], type):
        return repr(x[1])
    return repr(list(x)) if isinstance(x, tuple) else repr(x)
