"""Say why two paths have different ops at a place: a statement, a mode, a gradient, an optimizer."""

from __future__ import annotations

from lazytpu.diagnosis import events
from lazytpu.diagnosis.cause import Cause
from lazytpu.dtypes import short_name
from lazytpu.ir.site import Site
from lazytpu.ir.tree import Node
from lazytpu.location import source

_STATE_OPS = tuple(f"aten.{name}" for name in ("zeros", "full", "empty", "ones", "new_", "clone"))
_FROZEN = "none needed if parameters were frozen on purpose; else require the same gradients in every step"
_LOOP = "run the same number of iterations in every step, or pad"

# What decides inside torch, where the user's own line is the same: the text, and the fix.
_FIRST_STEP = ("the first optimizer step allocates its state", "none needed, later steps reuse this graph")
_OPTIMIZER = (
    "other parameters have gradients, or the optimizer's settings changed",
    "give the same parameters gradients in every step: zero_grad(set_to_none=False) gives zeros for none",
)
_BACKWARD = (
    "the backward pass computes another gradient: other tensors require gradients, or autograd's graph changed",
    _FROZEN,
)
_VIEW = ("an operand was added, left out, or has another memory layout", "")
_CALL = ("an argument that is no tensor decides, or which tensors require gradients", "")


def at_op(node: Node, other: Node | None = None) -> str:
    """Return ``op 3 (aten.mul.Tensor)``, or ``op 3 (aten.cosh instead of aten.exp)`` where another op was known."""
    instead = f" instead of {other.op.name}" if other is not None and other.op is not node.op else ""
    return f"op {node.depth} ({node.op.name}{instead})"


def of_control_path(node: Node, other: Node) -> Cause:
    """Return the cause where two paths go on with different ops, or with one op from two places."""
    new, old = node.site, other.site
    kind, text, fix = _switched(new, old) or ("branch", "", "")
    branch = None if text else decision(new, old)
    if branch is not None:
        text, fix = branch
    elif not text and node.depth == 1 and (events.is_resumed() or new != old):
        kind, text = "start", "another graph begins here"
        text += ", after a cut in the middle of the step" if events.is_resumed() else ""
    elif not text:
        text, fix = _undecided(node, other)
    return Cause(kind, f"{at_op(node, other)}: {text}", new, old, fix=fix)


def _switched(new: Site, old: Site) -> tuple[str, str, str] | None:
    """Return kind, text and fix where a mode or setting of torch differs between two places."""
    if new.accumulates != old.accumulates:
        was = "is accumulated where there was none" if new.accumulates else "is the first, and was accumulated"
        return "gradient", f"a gradient {was} before", ""
    if new.training is not None and old.training is not None and new.module:
        outer = new.module.partition(".")[0]
        same = (outer == old.module.partition(".")[0], new.module == old.module)
        for module, trains, trained, alike in zip((outer, new.module), new.training, old.training, same, strict=True):
            if alike and trains != trained:
                modes = ("train", "eval") if trained else ("eval", "train")
                return "mode", f"{module} was in {modes[0]} mode and is in {modes[1]} mode", ""
    if new.module == old.module and new.trainable != old.trainable:
        return "gradient", f"other parameters of {new.module} require gradients", _FROZEN
    if new.stack[:1] == old.stack[:1] and new.modes != old.modes:
        (grad, cast), (_, cast_before) = new.modes, old.modes
        if cast != cast_before:
            was, now = [f"on ({short_name(dtype)})" if dtype is not None else "off" for dtype in (cast_before, cast)]
            return "flag", f"torch.autocast was {was} and is {now}", ""
        was, now = ("off", "on") if grad else ("on", "off")
        return "flag", f"gradient recording (torch.no_grad) was {was} and is {now}", ""
    return None


def decision(new: Site, old: Site) -> tuple[str, str] | None:
    """Find the statement that sent two runs different ways; return what it did and the fix.

    It is looked for between the two lines themselves, then between the outermost lines at which their stacks differ.
    """
    innermost = list(zip(new.stack[:1], old.stack[:1], strict=False))
    for at, was in innermost + _first_difference(new, old):
        branch = source.branch_between(*at, was[1]) if at[0] == was[0] else None
        if branch is not None:
            return of_branch(branch)
    return None


def of_branch(branch: source.Branch) -> tuple[str, str]:
    """Return what a statement did, and the fix."""
    where = f"`{branch.text}` at {source.place(branch.file, branch.line)}"
    if not branch.loop:
        return f"{where} took another control path", ""
    return f"the loop {where} ran {'more' if branch.inside else 'fewer'} iterations", _LOOP


def _undecided(node: Node, other: Node) -> tuple[str, str]:
    """Return text and fix where no statement of the user's was found."""
    new, old = node.site, other.site
    differs = _first_difference(new, old)
    if new.backward and old.backward:
        return _BACKWARD
    if not new.stack or new.stack[0] != old.stack[0]:
        to = f", to {source.place(*differs[0][0])} instead of {source.place(*differs[0][1])}" if differs else ""
        return f"Python took another control path{to}", ""
    if ".step(" in source.code_of(*new.stack[0]):
        reason, fix = _FIRST_STEP if any(x.op.name.startswith(_STATE_OPS) for x in (node, other)) else _OPTIMIZER
    else:
        reason, fix = _VIEW if node.op.is_view or other.op.is_view else _CALL
    return f"{new} took another control path inside torch: {reason}", fix


def _first_difference(new: Site, old: Site) -> list[tuple[tuple[str, int], tuple[str, int]]]:
    """Return the outermost frames at which two stacks differ, if any."""
    pairs = zip(reversed(new.stack), reversed(old.stack), strict=False)
    return [(at, was) for at, was in pairs if at != was][:1]
