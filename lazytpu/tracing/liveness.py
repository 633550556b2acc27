"""What a cut has to compute, and which buffers it may reuse."""

from __future__ import annotations

from collections import Counter
from operator import attrgetter, is_, itemgetter
from sys import getrefcount
from typing import Any, cast

from lazytpu.config import config
from lazytpu.ir.tree import Value, trace
from lazytpu.tensors.layout import Layout
from lazytpu.tensors.storage import Storage, new_storage
from lazytpu.tracing.shardings_kept import give_to_gradients, wanted_shardings


def live_storages() -> list[Storage]:
    """Return storages that hold a value of this step and that somebody still holds, in order of creation.

    Somebody holds a storage when its reference count is above that of one only the lists here refer to.
    """
    step, pending = trace.recorded_step, trace.pending
    counts = list(map(getrefcount, pending))  # before `zip` refers to them, too
    held = [(s, n) for s, n in zip(pending, counts, strict=True) if n > _UNHELD and s.step == step]
    inputs = Counter(map(id, map(_storage_of, trace.inputs)))  # each entry holds its storage, too
    live = [s for s, n in held if n > _UNHELD + inputs.get(id(s), 0)]
    return list(dict.fromkeys(live))  # a cut in the middle of a write may have left one twice


_storage_of, _buffer_of = itemgetter(0), itemgetter(1)  # of an entry of the list of inputs


def _calibrate() -> int:
    """Return the references to a storage that only ``pending`` holds, as `live_storages` counts them."""
    pending = [new_storage(cast(Layout, None))]
    return next(map(getrefcount, pending))


_UNHELD = _calibrate()


def key_of(live: list[Storage]) -> Any:
    """Return the key of an executable on the last node: outputs, donated inputs, True behind them for bounds checks.

    For a step on a mesh there are always four: whether bounds are checked, and what sharding each output is to keep.

    XLA gives the memory of donated inputs to the outputs of their type in order, and copies where it does not suit.  So
    what overwrites an input comes first, in the order of these inputs.
    """
    if trace.mesh is not None:
        give_to_gradients()
    signature = _signature(live)
    known = trace.cursor.cut
    if known is not None and signature is not None and known[0] == signature:
        return known[1]
    key = _new_key(live)
    if signature is not None:
        trace.cursor.cut = signature, key
    return key


def _signature(live: list[Storage]) -> tuple[object, ...] | None:
    """Return what the key of a cut at the cursor follows from, which a loop over steps finds again at each cut.

    None where inputs share a buffer, or one has got another buffer in this step.
    """
    inputs = trace.inputs
    storages, buffers = [*map(_storage_of, inputs)], [*map(_buffer_of, inputs)]
    if len({*map(id, buffers)}) != len(buffers) or {*map(_STEP, storages)} != {trace.recorded_step}:
        return None
    if not all(map(is_, map(_BUFFER, storages), buffers)):
        return None
    return (
        [*map(_VALUE, live)],
        [*map(_VALUE, storages)],
        [*map(_LAYOUT, storages)],
        [*map(_SHARED, storages)],
        [*map(itemgetter(2), inputs)],
        config.donate,
        config.check_bounds,
        trace.mesh and (trace.mesh, trace.shardings, [*map(_SHARDING, live)], [s.buffer is None for s in live]),
    )


_STEP, _VALUE, _LAYOUT, _BUFFER, _SHARED, _SHARDING = map(
    attrgetter, ("step", "value", "layout", "buffer", "shared", "sharding")
)


def _new_key(live: list[Storage]) -> Any:
    donated, overwriting = donated_values(live) if config.donate else ((), ())
    values = [s.value for s in live if s.value.node is not None]
    if overwriting:
        held = set(values)
        values = [v for v in overwriting if v in held] + values
    key = tuple(dict.fromkeys(values)), donated
    if trace.mesh is not None:
        return (*key, config.check_bounds, wanted_shardings(live, key[0]))
    return (*key, True) if config.check_bounds else key


def donated_values(live: list[Storage]) -> tuple[tuple[Value, ...], list[Value]]:
    """Return input values whose buffers nobody can see after this step, and what overwrites the first of them.

    These are buffers of storages that were overwritten or have died, unless someone else holds them.
    """
    step, inputs = trace.recorded_step, trace.inputs
    kept = {s.value for s in live if s.value.node is None}
    owners = Counter(map(id, map(_buffer_of, inputs)))
    donated, overwriting, others = [], [], []
    for index, (storage, buffer, shared) in enumerate(inputs):
        if shared or storage.shared or owners[id(buffer)] > 1:
            continue
        overwritten = storage.step == step and storage.value.node is not None
        if overwritten or storage.buffer is not buffer:
            value = trace.input_value(index, storage.layout, trace.shardings.get(index))
            if value not in kept:
                if overwritten:
                    donated.append(value)
                    overwriting.append(storage.value)
                else:
                    others.append(value)
    return (*donated, *others), overwriting
