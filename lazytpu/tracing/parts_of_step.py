"""Tensors that are another one on each device do not outlive the step in which they were computed."""

from __future__ import annotations

from lazytpu.ir.graph import FROM_PARTS, TO_PARTS
from lazytpu.ir.tree import Value, operands, trace
from lazytpu.tensors.storage import NOTHING, Storage

_last = [0]  # the last step in which a tensor was split


def note() -> None:
    """Note that this step has such tensors."""
    _last[0] = trace.step


def without_parts(live: list[Storage]) -> list[Storage]:
    """Return those of some storages that hold whole tensors; the others lose their contents, as the step ends."""
    if _last[0] != trace.recorded_step:
        return live
    found: set[Value] = set()
    for node in trace.cursor.path():
        if node.op.name == TO_PARTS or (node.op.name != FROM_PARTS and not found.isdisjoint(operands(node))):
            found.update(node.results)
    for storage in [s for s in live if s.value in found]:
        storage.value, storage.step, storage.buffer, storage.lost = NOTHING, 0, None, True
    return [s for s in live if s.step]
