"""End the steps of training loops that call no `mark_step`: scripts written for other devices.

An optimizer that steps for the second time since the last cut is in such a loop.  Without a cut its graph would hold
one iteration after the other until something is read, as every fortieth loss: much memory, and a program of its own for
each number of iterations.  So that step and all later ones of the optimizer end a step.
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
from lazytpu.tracing.record import is_device_tensor
from lazytpu.tracing.step import mark_step

_IN_A_LOOP = -1
_last: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()
"""For each optimizer the number of the step in which it stepped last, or that it is in a loop without `mark_step`."""
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
    if _kept_whole or trace.apart or not trace.cursor.depth or not config.cut_loops:
        return
    last = _last.get(optimizer)
    if last is None and not any(is_device_tensor(p) for p in optimizer.param_groups[0]["params"][:1]):
        return
    if last == trace.step:
        logs.note(
            "step",
            "%s steps again without lazytpu.mark_step(): each of its steps ends one from now on, at %s",
            type(optimizer).__name__,
            site.line_here(),
        )
        last = _IN_A_LOOP
    if last == _IN_A_LOOP:
        _last[optimizer] = _IN_A_LOOP
        mark_step()
    else:
        _last[optimizer] = trace.step
