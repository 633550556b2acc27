"""The one way to watch the pipeline: subclass `Observer`, override what to be notified of, and `add` an instance.

The part of the pipeline that notifies knows this module and no observer, so nothing has to import upwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any


class Observer:
    """What can be watched.  Each method does nothing here, and one that is not overridden costs nothing."""

    def setting_changing(self, name: str, value: object) -> None:
        """A field of `lazytpu.config` is about to get a new value; raise to leave it as it is."""

    def rule_registered(self, op: Any) -> None:
        """A lowering rule was registered for an op."""

    def op_new(self, node: Any) -> None:
        """An op that is not found in the trace tree is about to be recorded."""

    def op_recorded(self) -> None:
        """An op that took the general path was recorded, and its results have their storages."""

    def graph_cut(self, key: Any) -> None:
        """A graph is about to run; ``key`` has its outputs and donated inputs."""

    def executable_made(self, executable: Any) -> None:
        """An executable was compiled, or loaded from disk, and has not run (`runtime.executable.Executable`)."""

    def graph_compiled(self, compilation: Any) -> None:
        """A graph was compiled, or loaded from disk (`diagnosis.events.Compilation`)."""

    def step_ended(self, step: Any) -> None:
        """A step is over (`observe.metrics_tables.Step`)."""

    def region(self, name: str) -> AbstractContextManager[object] | None:
        """A named part of the work begins; what is returned is entered, and left with it."""

    def metrics_reset(self) -> None:
        """`lazytpu.metrics.reset` was called."""

    def counters(self) -> Mapping[str, int]:
        """Return counters that the observer keeps itself, because it updates them in the hot path."""
        return {}


_EVENTS = [name for name in vars(Observer) if not name.startswith("_")]
_calls: dict[str, list[Callable[..., Any]]] = {name: [] for name in _EVENTS}


def add(observer: Observer) -> None:
    """Notify an observer from now on."""
    for name in _EVENTS:
        if getattr(type(observer), name) is not getattr(Observer, name):
            _calls[name].append(getattr(observer, name))


def remove(observer: Observer) -> None:
    """Notify an observer no longer."""
    for name in _EVENTS:
        _calls[name][:] = [call for call in _calls[name] if getattr(call, "__self__", None) is not observer]


def calls_of(event: str) -> list[Callable[..., Any]]:
    """Return the methods to call for an event: the same list for good, which `add` and `remove` change."""
    return _calls[event]


def notify(event: str, *args: object) -> None:
    """Call every observer of an event, the oldest first."""
    for call in tuple(_calls[event]):
        call(*args)
