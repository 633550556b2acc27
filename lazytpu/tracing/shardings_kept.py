"""See to it at the cut that what has a sharding keeps it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import lru_cache

import torch

from lazytpu.ir.graph import Graph
from lazytpu.ir.sharding import Sharding, interned
from lazytpu.ir.tree import Value, trace
from lazytpu.runtime import meshes
from lazytpu.runtime.client import Buffer
from lazytpu.tensors.layout import Layout
from lazytpu.tensors.storage import Storage, resolve, storage_of
from lazytpu.tracing.parts_of_step import own_of_step
from lazytpu.tracing.record import cell_of, is_device_tensor

_leaves: dict[int, weakref.ref[torch.Tensor]] = {}  # parameters with a sharding


def share_with_gradient(parameter: torch.Tensor) -> None:
    """Let the gradient of a parameter take its sharding from now on."""
    key = id(parameter)
    if key not in _leaves:
        _leaves[key] = weakref.ref(parameter, lambda _: _leaves.pop(key, None))


def forget(parameter: torch.Tensor) -> None:
    """Let the gradient of a parameter, which moves to another device, take no sharding any more."""
    _leaves.pop(id(parameter), None)


def wanted_shardings(live: list[Storage], outputs: tuple[Value, ...]) -> tuple[Sharding | None, ...]:
    """Return what the storages that hold the outputs of a step on a mesh want, None where they want nothing.

    What overwrites a storage keeps its sharding; a gradient has that of its parameter, after `give_to_gradients`.
    """
    mesh = trace.mesh
    assert mesh is not None
    found: dict[Value, Sharding] = {}
    own = own_of_step()
    for storage in live:
        value = storage.value
        if value.node is None or value in found:
            continue
        if value in own:
            found[value] = interned(mesh, ((),) * len(value.layout.size), own=True)
        elif storage.sharding is not None and not storage.sharding.own:
            found[value] = storage.sharding
        elif storage.buffer is not None:
            found[value] = interned(mesh, ((),) * len(value.layout.size))
    return tuple([found.get(value) for value in outputs])


def give_to_gradients() -> None:
    """Give gradients that this step writes the shardings of their parameters."""
    for reference in list(_leaves.values()):
        parameter = reference()
        grad = None if parameter is None else parameter.grad
        if not is_device_tensor(grad) or not is_device_tensor(parameter):
            continue
        own, (storage, layout) = storage_of(cell_of(parameter)), resolve(cell_of(grad))
        written = storage.step == trace.recorded_step and storage.value.node is not None  # else it lies as it did
        if written and storage.sharding is None and own.sharding is not None and layout.size == own.layout.size:
            whole = layout is storage.layout
            storage.sharding = own.sharding if whole else _of_storage(own.sharding, storage.layout, layout)


def _of_storage(sharding: Sharding, root: Layout, layout: Layout) -> Sharding | None:
    """Return how a storage lies whose view, of all of it, lies as a sharding says; None where no sharding is that."""
    dims = dimensions(root, layout)
    if dims is None or any(axes and d is None for d, axes in zip(dims, sharding.spec, strict=True)):
        return None
    names = {d: axes for d, axes in zip(dims, sharding.spec, strict=True) if d is not None}
    return interned(sharding.mesh, tuple([names.get(d, ()) for d in range(len(root.size))]))


@lru_cache(4096)
def dimensions(root: Layout, layout: Layout) -> tuple[int | None, ...] | None:
    """Return which dimension of a storage each one of a view is, None for those of one element.

    None instead of all where they are not the same, or not all of the storage.
    """
    free = {d: pair for d, pair in enumerate(zip(root.size, root.stride, strict=True)) if pair[0] != 1}
    found: list[int | None] = []
    for size, stride in zip(layout.size, layout.stride, strict=True):
        at = next((d for d, pair in free.items() if pair == (size, stride)), None)
        found.append(at)
        if at is not None:
            del free[at]
        elif size != 1:
            return None
    return None if free or layout.offset or layout.dtype != root.dtype or layout.bits else tuple(found)


def note_result(storage: Storage, asked: Sharding | None) -> None:
    """Note how a result of a step on a mesh lies, which a storage holds now.

    Args:
        asked: the sharding that was wanted for it, another than that of the storage.
    """
    assert trace.mesh is not None and storage.buffer is not None
    if asked is not None and asked.own:
        storage.sharding = asked
    elif asked is None or storage.sharding is not None or not asked.is_replicated:
        storage.sharding = meshes.sharding_of(storage.buffer, trace.mesh)


def take_over(storage: Storage, index: int) -> None:
    """Give a storage the contents of an input of this step, which it shares from now on if they lie alike."""
    _, buffer, _ = trace.inputs[index]
    lies = trace.shardings.get(index)
    if storage.sharding is None and storage.buffer is None:
        storage.sharding = lies
    elif (lies is not None and lies.own) or (storage.sharding is not None and storage.sharding.own):
        storage.sharding = lies
    elif storage.sharding is not lies:
        buffer = meshes.put(meshes.whole_of(buffer, storage.layout.size), storage.sharding, storage.layout.size)
    storage.buffer, storage.shared = buffer, True


def placed(graph: Graph, numbers: Sequence[int], buffers: Sequence[Buffer]) -> list[Buffer]:
    """Return the inputs of a graph where it takes them; a storage keeps what was put on a mesh for it.

    Args:
        numbers: those of the inputs in the step.
        buffers: what they are.
    """
    found = meshes.placed(graph, buffers)
    if graph.mesh is not None:
        for number, old, new in zip(numbers, buffers, found, strict=True):
            storage = trace.inputs[number][0]
            if new is not old and storage.buffer is old:
                storage.buffer = new
    return found
