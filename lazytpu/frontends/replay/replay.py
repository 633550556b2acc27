"""A recorded call as a program that runs again without Python: what `compile` keeps of a function.

Between two runs the arrays stay where the executable left them, in one list whose order is that of its results.
The storages they belong to are *parked*: each knows the program, and the first that anyone looks at or writes to
brings all of them back.  So a run in a row costs the call of the executable and little else, however many tensors
there are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain, repeat
from operator import is_not, itemgetter
from sys import getrefcount
from typing import Any

import numpy as np
import torch

from lazytpu import random
from lazytpu.frontends.replay.recorded_call import RecordedCall
from lazytpu.ir.tree import trace
from lazytpu.observe import metrics
from lazytpu.runtime import executables, launch, meshes
from lazytpu.runtime.client import Buffer, Scalars
from lazytpu.runtime.host.interrupts import uninterrupted
from lazytpu.tensors.storage import Storage, new_storage, resolve, write_buffer
from lazytpu.tensors.tensor import LazyTensor, make, make_view, view_at
from lazytpu.tracing import cutting, reading, record
from lazytpu.tracing.record import cell_of

_Tensor: Any = torch.Tensor
grad_of: Callable[[Any], Any] = _Tensor.grad.__get__
_set_grad: Callable[[Any, Any], None] = _Tensor.grad.__set__


class Parked(Storage):
    """A storage whose contents lie in a program's list until someone asks for them."""

    pool: ReplayedProgram


def _asks_first(name: str) -> property:
    """Return an attribute of `Parked` that brings the contents back before it is read or set."""

    def read(storage: Parked) -> Any:
        storage.pool.unpark()
        return getattr(storage, name)

    def write(storage: Parked, value: object) -> None:
        storage.pool.unpark()
        setattr(storage, name, value)

    return property(read, write)


for _name in ("value", "dirty", "buffer", "shared", "reads", "reads_root", "reads_step", "moved", "host"):
    setattr(Parked, _name, _asks_first(_name))


class ReplayedProgram:
    """A call that can be replayed.

    Every array has a *slot*: the outputs of the executable come first, then what it reads and never writes
    (``constants``), then scalars of that kind that are asked for anew in each run (a learning rate that somebody
    sets), then the arguments.
    """

    def __init__(self, call: RecordedCall) -> None:
        graph = call.executable.graph
        self.call, self.parked = call, False
        self.slots: dict[Storage, int] = {}
        self.held: list[Any] = []
        self.flat: Any = None  # the outputs that the executable gives as one array, last in `held` and None there
        self.outputs = len(graph.outputs)
        for output, storages in enumerate(call.written):
            self.slots.update(dict.fromkeys(storages, output))
        volatile: dict[Storage, int] = {}
        constants = 0
        for source, equals in zip(call.sources, call.equals, strict=True):
            if isinstance(source, int) or source in self.slots:
                continue
            if source.layout.size or equals:
                self.slots.update(dict.fromkeys([source, *equals], self.outputs + constants))
                constants += 1
            else:
                volatile[source] = len(volatile)
        self.kept_slots = self.outputs + constants
        self.volatile = list(volatile)
        self.leaf_sources = sorted({s for s in call.sources if isinstance(s, int)})
        leaf_slots = {leaf: self.kept_slots + len(volatile) + i for i, leaf in enumerate(self.leaf_sources)}
        slots = [
            leaf_slots[s] if isinstance(s, int) else self.slots[s] if s in self.slots else self.kept_slots + volatile[s]
            for s in call.sources
        ]
        given, kept = launch.split_donated(graph, slots)
        self._given, self._kept = _getter(given), _getter(kept)
        read = [[s, *equals] for s, equals in zip(call.sources, call.equals, strict=True) if isinstance(s, Storage)]
        self._read = [(s, self.slots[s]) for group in read for s in group if s in self.slots]
        owners = [*self.slots.values(), *[g.slot for g in call.gradients]]
        self._shared = {slot for slot, n in Counter(owners).items() if n > 1}
        self._donated = set(given)
        self._fleeting = sorted(set(range(self.outputs)) - set(owners))
        self._mesh = graph.mesh
        self._whole = {slot for slot, v in zip(slots, graph.inputs, strict=True) if v.sharding is None}
        self._shardings = [(s, s.sharding) for s in self.slots]
        self._leaf_writes = [(output, leaf) for output, leaves in enumerate(call.leaves) for leaf in leaves]
        self._resident = not call.keys and self._mesh is None
        self._scalars = self._new_scalars()
        self._start = launch.start_ready if self._resident else launch.start
        self._parameters = [g.parameter for g in call.gradients]
        self._grads = [g.tensor for g in call.gradients]
        self._grad_storages: list[Storage] = []
        self._grad_ids: list[int] = []
        self._grad_references = -1
        self._accumulating = [p for p, _ in call.kept_gradients]
        self._accumulated = [id(g) for _, g in call.kept_gradients]
        memories = {(result.what, result.memory) for result in call.results if result.kind == "output"}
        times = Counter(slot for slot, _ in memories)
        self._results_shared = {s for s, n in times.items() if n > 1 or s in self._shared or s in owners}

    def follow(self, floats: list[float]) -> bool:
        """Take these floats from now on; return whether the executable is for them."""
        if not executables.fits(self.call.executable, floats, self.call.numbers[1]):
            return False
        self.call.numbers[0][:] = floats
        self._scalars = self._new_scalars()
        return True

    def _new_scalars(self) -> Scalars:
        scalars = launch.scalar_arrays(self.call.executable.graph, *self.call.numbers)
        return launch.resident(scalars) if self._resident else scalars

    def holds(self, storage: Storage) -> bool:
        """Return whether a storage is one that the program reads or writes besides its arguments."""
        return storage in self.slots or storage in self.volatile

    def separates(self) -> bool:
        """Return whether storages that shared a buffer would no longer do so after a run."""
        groups = [[s, *e] for s, e in zip(self.call.sources, self.call.equals, strict=True) if isinstance(s, Storage)]
        return any(len({self.slots.get(s) for s in group}) > 1 for group in groups)

    def run(self, leaves: Sequence[torch.Tensor]) -> Any:
        """Run on the present contents of everything.

        Args:
            leaves: the leaves of the arguments.

        Returns:
            What the function returns; `UNFIT` where buffers that were one no longer are, or lie otherwise.
        """
        call, graph = self.call, self.call.executable.graph
        with record.lock:
            if trace.cursor.depth:
                cutting.cut("lazytpu.compile")
            storages = [resolve(cell_of(leaves[i]))[0] for i in self.leaf_sources]
            if any(map(self.holds, storages)) or list(map(id, map(grad_of, self._accumulating))) != self._accumulated:
                return UNFIT
            grads, missing = self._present_grads()
            fresh = bool(self._parameters) and not self._own(grads)
            if fresh or not self.parked:
                self.unpark()
                held = self._gather()
                if held is None:
                    return UNFIT
            else:
                held = self.held
            every = [*held, *map(_buffer, self.volatile), *map(_buffer, storages)]
            if meshes.used:
                self._place(every, storages)
            self._keep_shared_arguments(every, storages)
            scalars = self._scalars_with_new_keys() if call.keys else self._scalars
            with uninterrupted():
                results = self._start(call.executable, self._given(every), self._kept(every), scalars)
                outputs: Sequence[Buffer | None] = cutting.outputs_of(call.executable, results, call.path, call.key[0])
                if graph.concatenated:
                    *outputs, self.flat = outputs
                    outputs = [*outputs, *[None] * graph.concatenated]
                self.held = [*outputs, *held[self.outputs :]]
                for slot in self._fleeting:
                    self.held[slot] = None
                if fresh:
                    self._renew_grads()
                elif missing:
                    for parameter, grad in zip(self._parameters, self._grads, strict=True):
                        _set_grad(parameter, grad)
                if not self.parked:
                    self._park()
                for slot, leaf in self._leaf_writes:
                    target = resolve(cell_of(leaves[leaf]))[0]
                    write_buffer(target, outputs[slot], slot in self._shared or slot in self._results_shared)
        return call.structure(self._results(outputs, leaves))

    def unpark(self) -> None:
        """Give every storage its contents."""
        with record.lock, uninterrupted():
            if not self.parked:
                return
            self.parked = False
            if self.flat is not None:
                packed = launch.split_concatenated(self.call.executable.graph, self.flat)
                self.held[self.outputs - len(packed) : self.outputs] = packed
            grads = [(s, g.slot) for s, g in zip(self._grad_storages, self.call.gradients, strict=True)]
            for storage, slot in (*self.slots.items(), *grads):
                if storage.__class__ is Parked:
                    storage.__class__ = Storage  # type: ignore[assignment]
                    write_buffer(storage, self.held[slot], slot in self._shared)
            self.held, self.flat = [], None

    def _park(self) -> None:
        for storage in (*self.slots, *self._grad_storages):
            storage.__class__ = Parked
            storage.pool = self  # type: ignore[attr-defined]
        self.parked = True

    def _gather(self) -> list[object] | None:
        """Return the contents of the storages by slot.

        None where one buffer for several has become several, or a storage lies on a mesh in another way than it did.
        """
        if any(storage.sharding is not sharding for storage, sharding in self._shardings):
            return None
        held: list[Any] = [None] * self.kept_slots
        for storage, slot in self._read:
            buffer = _buffer(storage)
            if held[slot] is None:
                if storage.shared and slot in self._donated:  # someone else holds it, and may not lose it
                    buffer = buffer.copy()
                    metrics.count("copied_before_donation")
                held[slot] = buffer
            elif held[slot] is not buffer:
                return None
        if meshes.used:
            for slot in self._whole.intersection(range(self.kept_slots)):
                held[slot] = meshes.taken_by(self._mesh, held[slot])
        return held

    def _place(self, every: list[Any], storages: Sequence[Storage]) -> None:
        """Put what is asked for anew where the program takes it; what lies on a mesh then stays there."""
        for slot, storage in enumerate(chain(self.volatile, storages), self.kept_slots):
            if slot in self._whole:
                found = meshes.taken_by(self._mesh, every[slot])
                if self._mesh is not None and storage.buffer is every[slot]:
                    storage.buffer = found
                every[slot] = found

    def _keep_shared_arguments(self, every: list[Any], storages: Sequence[Storage]) -> None:
        """Copy the buffers of arguments that are to be donated and that someone else holds."""
        first = len(every) - len(storages)
        for slot, storage in enumerate(storages, first):
            if storage.shared and slot in self._donated:
                every[slot] = every[slot].copy()
                metrics.count("copied_before_donation")

    def _present_grads(self) -> tuple[list[Any], bool]:
        """Return the gradients that are there, and whether all have been taken away (``zero_grad``)."""
        grads = list(map(grad_of, self._parameters))
        if grads and not any(map(is_not, grads, repeat(None))):
            return self._grads[:], True
        return grads, False

    def _own(self, grads: list[object]) -> bool:
        """Return whether these are the program's own gradients that nobody else holds, so that they can be written."""
        return list(map(id, grads)) == self._grad_ids and self._references(grads) == self._grad_references

    def _references(self, grads: list[object]) -> int:
        return sum(map(getrefcount, grads)) + sum(map(getrefcount, self._grad_storages))

    def _renew_grads(self) -> None:
        """Put new tensors in the place of gradients, as autograd does; others may hold the old ones."""
        self._make_grads()
        grads = list(map(grad_of, self._parameters))
        self._grad_ids = list(map(id, grads))
        self._grad_references = self._references(grads)

    def _make_grads(self) -> None:
        wholes: dict[Storage, LazyTensor] = {}
        self._grads, self._grad_storages = [], []
        for gradient in self.call.gradients:
            whole = wholes.get(gradient.storage)
            if whole is None:
                whole = wholes[gradient.storage] = make(new_storage(gradient.storage.layout))
                whole._s.sharding = gradient.storage.sharding
            storage: Storage = whole._s
            grad = whole if gradient.layout is storage.layout else make_view(whole, storage, gradient.layout)
            _set_grad(gradient.parameter, grad)
            self._grads.append(grad)
            self._grad_storages.append(storage)

    def _scalars_with_new_keys(self) -> Scalars:
        floats, ints, complexes = self._scalars
        ints = np.array(ints)
        for position in self.call.keys:
            ints[position : position + 2] = record.signed(random.default_generator.next_key())
        return floats, ints, complexes

    def _results(self, outputs: Sequence[Buffer | None], leaves: Sequence[Any]) -> list[Any]:
        """Return the leaves of the return value."""
        wholes: dict[int, LazyTensor] = {}
        made: list[Any] = []
        for (kind, what, layout, requires_grad, memory), sharding in zip(
            self.call.results, self.call.shardings, strict=True
        ):
            if kind == "output":
                if memory in wholes:
                    result = view_at(wholes[memory], layout)
                else:
                    storage = new_storage(layout.root, outputs[what])
                    storage.shared, storage.sharding = what in self._results_shared, sharding
                    whole = wholes[memory] = make(storage)
                    result = whole if layout is layout.root else view_at(whole, layout)
                made.append(result.requires_grad_() if requires_grad else result)
            elif kind == "argument":
                made.append(leaves[what])
            elif kind == "leaf view":
                made.append(view_at(leaves[what], layout))
            elif kind == "same":
                made.append(made[what])
            elif kind == "grad":
                made.append(self._grads[what])
            elif kind == "grad view":
                made.append(view_at(self._grads[what], layout))
            else:
                made.append(what)
        return made


UNFIT = object()
"""What `ReplayedProgram.run` returns where the call has to be recorded."""


def _buffer(storage: Storage) -> Any:
    if storage.step != trace.step and storage.buffer is not None:
        return storage.buffer
    return reading.buffer_of(storage, "read")


def _getter(positions: list[int]) -> Callable[[Sequence[Any]], list[Any]]:
    """Return a function of a sequence that gives the list of its elements at the positions."""
    if len(positions) < 2:
        return lambda every: [every[i] for i in positions]
    get = itemgetter(*positions)
    return lambda every: list(get(every))
