"""Running each op at once (``lazytpu.config.eager``), and telling of each op that is recorded: for debugging.

Neither costs the hot path anything.  While one of them is on, the trace tree remembers nothing (`Trace.remember`), so
that every op takes the slow path that a new op takes, and that path looks here.
"""

from __future__ import annotations

from collections.abc import Callable

from lazytpu import bounds, record, step
from lazytpu.config import before_change, config
from lazytpu.ir.tree import Node, trace

_reasons = 0


def forget_as_you_go(on: bool) -> None:
    """Makes every op a new one, or no longer; calls nest.  Runs what is pending."""
    global _reasons
    with record.lock:
        step.cut("debug")
        _reasons += 1 if on else -1
        trace.remember(not _reasons)


def watch(tell: Callable[[Node], None]) -> None:
    """Makes ``tell`` get each op, just before it is recorded."""
    forget_as_you_go(True)
    record.watchers.append(tell)


def unwatch(tell: Callable[[Node], None]) -> None:
    """Ends `watch`."""
    record.watchers.remove(tell)
    forget_as_you_go(False)


def _run_now() -> None:
    """Runs the op just recorded and waits for it; where that fails, the op has not happened."""
    try:
        step.cut("eager")
    except Exception:
        start = (trace.root, trace.nodes, None, None, [0] * 5)  # nothing was pending before the op
        for storage in trace.rewind(start):
            storage.value, storage.step, storage.dirty = None, 0, 0
        raise
    step.wait_for_last()
    bounds.raise_if_any()


record.run_now = _run_now
before_change("eager", forget_as_you_go)
if config.eager:  # from the environment
    forget_as_you_go(True)
