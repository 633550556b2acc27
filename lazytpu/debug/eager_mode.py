"""Run each op at once (``lazytpu.config.eager``), and watch each op as it is recorded.

Neither costs the hot path anything.  While one of them is on, the trace tree remembers nothing (`Trace.remember`), so
every op is a miss, and only the path of a miss calls this module.
"""

from __future__ import annotations

from lazytpu.config import config
from lazytpu.ir.tree import trace
from lazytpu.observers import Observer, add, remove
from lazytpu.tracing import cutting, record, step

_reasons = 0


def forget_as_you_go(on: bool) -> None:
    """Make every op a miss, or no longer; calls nest.  Runs what is pending."""
    global _reasons
    with record.lock:
        cutting.cut("debug")
        _reasons += 1 if on else -1
        trace.remember(not _reasons)


def watch(observer: Observer) -> None:
    """Notify an observer of each op just before it is recorded (``op_new``) and once it is (``op_recorded``).

    If ``op_new`` reads a tensor, the graph is cut and the op is recorded again, with another call.
    """
    forget_as_you_go(True)
    add(observer)


def unwatch(observer: Observer) -> None:
    """End `watch`."""
    remove(observer)
    forget_as_you_go(False)


class _RunNow(Observer):
    """Runs each op when it is recorded."""

    def op_recorded(self) -> None:
        _run_now()


_run_each_now = _RunNow()


class _Switch(Observer):
    """Follows ``lazytpu.config.eager``."""

    def setting_changing(self, name: str, value: object) -> None:
        if name == "eager":
            (watch if value else unwatch)(_run_each_now)


def _run_now() -> None:
    """Run the op just recorded and wait for it; undo the op if that fails."""
    try:
        cutting.cut("eager")
    except Exception:
        start = (trace.root, trace.nodes, None, None, [0] * 5, None)  # nothing was pending before the op
        for storage in trace.rewind(start):
            storage.value, storage.step, storage.dirty = None, 0, 0
        raise
    step.wait()


add(_Switch())
if config.eager:  # from the environment
    watch(_run_each_now)
