"""Running each op at once (``lazytpu.config.eager``), and telling of each op that is recorded: for debugging.

Neither costs the hot path anything.  While one of them is on, the trace tree remembers nothing (`Trace.remember`), so
that every op takes the slow path that a new op takes, and that path looks here.
"""

from __future__ import annotations

from collections.abc import Callable

from lazytpu.config import before_change, config
from lazytpu.ir.tree import Node, trace
from lazytpu.tracing import record, step

_reasons = 0


def forget_as_you_go(on: bool) -> None:
    """Makes every op a new one, or no longer; calls nest.  Runs what is pending."""
    global _reasons
    with record.lock:
        step.cut("debug")
        _reasons += 1 if on else -1
        trace.remember(not _reasons)


def watch(tell: Callable[[Node], None], done: Callable[[], None]) -> None:
    """Makes ``tell`` get each op, just before it is recorded, and calls ``done`` when it is.

    Where a tensor is read meanwhile the graph is cut, and the op is recorded, and told of, again.
    """
    forget_as_you_go(True)
    record.watchers.append(tell)
    record.after_write.append(done)


def unwatch(tell: Callable[[Node], None], done: Callable[[], None]) -> None:
    """Ends `watch`."""
    record.watchers.remove(tell)
    record.after_write.remove(done)
    forget_as_you_go(False)


def _switch(on: bool) -> None:
    forget_as_you_go(on)
    if on:
        record.after_write.append(_run_now)
    else:
        record.after_write.remove(_run_now)


def _run_now() -> None:
    """Runs the op just recorded and waits for it; where that fails, the op has not happened."""
    try:
        step.cut("eager")
    except Exception:
        start = (trace.root, trace.nodes, None, None, [0] * 5)  # nothing was pending before the op
        for storage in trace.rewind(start):
            storage.value, storage.step, storage.dirty = None, 0, 0
        raise
    step.wait()


before_change("eager", _switch)
if config.eager:  # from the environment
    _switch(True)
