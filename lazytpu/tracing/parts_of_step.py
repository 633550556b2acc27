"""Which values of a step are other ones on each device."""

from __future__ import annotations

from lazytpu.ir.graph import own_values
from lazytpu.ir.tree import Value, trace

_last = [0]  # the last step in which a tensor was split


def note() -> None:
    """Note that a tensor is split in this step."""
    _last[0] = trace.step


def own_of_step() -> set[Value]:
    """Return the results in this step of which each device has its own."""
    if _last[0] != trace.recorded_step and not any(sharding.own for sharding in trace.shardings.values()):
        return set()
    return own_values(trace.cursor.path())
