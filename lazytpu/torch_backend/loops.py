"""End the steps of training loops that call no `mark_step`: scripts written for other devices.

An optimizer that steps for the second time since the last cut is in such a loop.  Without a cut its graph would hold
one iteration after the other until something is read, as every fortieth loss: much memory, and a program of its own for
each number of iterations.  So that step and the later ones of the optimizer end a step, until the program calls
`mark_step` itself: an optimizer may step once before its loop, to make its state.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from lazytpu.config import config
from lazytpu.ir.tree import trace
from lazytpu.location import site
from lazytpu.observe import logs
from lazytpu.tracing import step
from lazytpu.tracing.record import is_device_tensor

_last: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
"""For each optimizer the number of the step in which it stepped last."""
_looping: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
"""For those in a loop how often the program had called `mark_step` when they stepped last."""
_ended = 0  # steps that were ended here
_kept_whole = False


def register() -> None:
    """Have torch tell when an optimizer has stepped."""
    register_optimizer_step_post_hook(_stepped)


@contextmanager
def kept_whole() -> Iterator[None]:
    """Keep what is recorded one graph, however often optimizers step."""
    global _kept_whole
    before, _kept_whole = _kept_whole, True
    try:
        yield
    finally:
        _kept_whole = before


def _stepped(optimizer: torch.optim.Optimizer, *_: object) -> None:
    global _ended
    if _kept_whole or trace.isolated or not trace.cursor.depth or not config.cut_loops:
        return
    last, marks = _last.get(optimizer), step.marks - _ended
    if last is None and not any(is_device_tensor(p) for group in optimizer.param_groups for p in group["params"]):
        return
    if _looping.get(optimizer) != marks:
        _last[optimizer] = trace.step
        if last != trace.step:
            return
        logs.note(
            "step",
            "%s steps again without lazytpu.mark_step(): each of its steps ends one from now on, at %s",
            type(optimizer).__name__,
            site.line_here(),
        )
        _looping[optimizer] = marks
    _ended += 1
    step.mark_step()
