"""What made Python take another way, from the lines that two ops came from."""

from __future__ import annotations

from dataclasses import dataclass

from lazytpu.dtypes import short_name
from lazytpu.location import source
from lazytpu.location.site import Site

_KEPT = "nothing, if there are few ways: each is kept; where data decides, torch.where puts both into one graph"

_ONE_EACH = "nothing, if it happens once: a graph is kept for each way"


@dataclass(frozen=True, slots=True)
class Fork:
    """What made the difference, in words, what to do about it, and the line of the statement where one was found."""

    text: str
    fix: str
    line: int = 0

    @property
    def found(self) -> bool:
        """Whether a statement was found."""
        return bool(self.line)


def mode_switch(new: Site, old: Site) -> str:
    """``Net was in train mode and is in eval mode`` where a module was switched; else empty."""
    if new.training is None or old.training is None or not new.module:
        return ""
    outer = new.module.partition(".")[0]
    if outer == old.module.partition(".")[0] and new.training[0] != old.training[0]:
        return _switched(outer, new.training[0])
    if new.module == old.module and new.training[1] != old.training[1]:
        return _switched(new.module, new.training[1])
    return ""


def _switched(module: str, training: bool) -> str:
    modes = ("eval", "train")
    return f"{module} was in {modes[not training]} mode and is in {modes[training]} mode"


def flag_switch(new: Site, old: Site) -> str:
    """What was switched around a line that both paths have: ``torch.autocast was off and is on (bf16)``; else empty."""
    if new.stack[:1] != old.stack[:1] or new.modes == old.modes:
        return ""
    (grad, cast), (_, was) = new.modes, old.modes
    if cast == was:
        return (
            f"gradients are {'recorded here, and were not' if grad else 'not recorded here, and were'} (torch.no_grad)"
        )
    told = [f"on ({short_name(dtype)})" if dtype is not None else "off" for dtype in (was, cast)]
    return f"torch.autocast was {told[0]} and is {told[1]}"


def hook(new: Site, old: Site) -> str:
    """What is told where one of two ops belongs to a gradient, and the other to a function called in between."""
    if new.backward == old.backward or not new.stack or not old.stack or set(new.stack[1:]) & set(old.stack[1:]):
        return ""
    ours = old if new.backward else new
    if len(ours.stack) > 1 and not new.backward:
        return ""
    now = "no longer runs" if new.backward else "runs"
    return f"{source.place(*ours.stack[0])} {now} in the middle of the backward pass: a hook, or a function's backward"


def what_parted(new: Site, old: Site) -> Fork:
    """The statement that sent two runs different ways.

    It is looked for between the two lines themselves, and then on the outermost lines at which their stacks differ.
    """
    at, was = _first_difference(new, old)
    if at is None or was is None:
        return Fork("Python took another control path", _KEPT)
    branch = _branch(new.stack[0], old.stack[0]) or _branch(at, was)
    if branch is not None:
        return _of_branch(branch, branch.inside)
    if at == was:
        return Fork(f"{source.place(*at)} took another control path inside the call", _KEPT)
    return Fork(f"Python took another control path, to {source.place(*at)} instead of {source.place(*was)}", _KEPT)


def other_caller(new: Site, old: Site) -> str:
    """``, called from train.py:51 instead of train.py:44`` where the same line was reached from another one."""
    at, was = _first_difference(new, old)
    if at is None or was is None or at == was:
        return ""
    return f", called from {source.place(*at)} instead of {source.place(*was)}"


def what_left_out(last: Site, further: Site, cut: Site, *, now: bool) -> Fork | None:
    """The statement that decides whether a function goes on after ``last`` with ``further``, or returns to be cut.

    Args:
        now: whether it goes on this time, and returned the time before.
    """
    if not last.stack or not further.stack or last.stack[0][0] != further.stack[0][0]:
        return None
    (file, before), (_, line) = last.stack[0], further.stack[0]
    if cut.file == file and source.same_function(file, line, cut.line):
        return None
    branch = source.entered_after(file, line, before)
    return None if branch is None else _of_branch(branch, now)


def what_went_on(last: Site, further: Site, *, now: bool) -> Fork:
    """Why more ops come before a cut than before, where no statement is found.

    Args:
        last: of the op before which both are alike.
        further: of the op after it.
        now: whether it goes on this time, and did not the time before.
    """
    at = further.stack[0] if further.stack else None
    if at is None:
        return Fork("Python did more" if now else "Python did less", _KEPT)
    loop = source.comprehension_on(*at) if at in last.stack else None
    if loop is not None:
        return _of_branch(loop, now)
    place = source.place(*at)
    if at in last.stack:
        return Fork(f"{place} does {'more' if now else 'less'} inside the call than before", _ONE_EACH)
    return Fork(f"{place} {'runs before it, and did not' if now else 'does not run before it, and did'}", _KEPT)


def _of_branch(branch: source.Branch, longer: bool) -> Fork:
    where = f"`{branch.text}` at {source.place(branch.file, branch.line)}"
    if not branch.loop:
        return Fork(f"{where} took another control path", _KEPT, branch.line)
    ending = "ran longer" if longer else "ended sooner"
    return Fork(
        f"the loop {where} {ending}", "give the loop the same number of turns in every step, or pad", branch.line
    )


def _branch(at: tuple[str, int], was: tuple[str, int]) -> source.Branch | None:
    return source.branch_between(at[0], at[1], was[1]) if at[0] == was[0] else None


def _first_difference(new: Site, old: Site) -> tuple[tuple[str, int] | None, tuple[str, int] | None]:
    """The outermost frames at which two stacks differ; the innermost of both where they do not."""
    for at, was in zip(reversed(new.stack), reversed(old.stack), strict=False):
        if at != was:
            return at, was
    shorter = min(new.stack, old.stack, key=len)
    return (shorter[0], shorter[0]) if shorter else (None, None)
