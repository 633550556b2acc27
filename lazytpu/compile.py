"""`compile`: a whole step as one executable, without running its Python again.

The function is recorded as usual for its first calls.  From then on a call with arguments of the same types
runs the executable straight away: it takes the buffers of the arguments and of every tensor the function
reached (parameters, optimizer state), and stores the results where the recorded call left them.

What Python computes is frozen by this, so two recorded calls in a row have to agree in everything, numbers
included, before the step is replayed.  A step that never agrees (a bias correction that Python computes, a
tensor read in the middle) keeps being recorded, and `lazytpu.explain` says why.  Optimizers that have a
``capturable`` form are switched to it, so that their step counters live on the device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from lazytpu import events, metrics, random, record, runtime, step, tensor
from lazytpu.interrupts import uninterrupted
from lazytpu.ir.tree import Node, trace
from lazytpu.record import cell_of, is_device_tensor
from lazytpu.storage import Storage, new_storage, resolve, write_buffer
from lazytpu.tensor import make, make_view

# Calls that are recorded at most before a step is given up as one that cannot be replayed.
MAX_RECORDED = 5


@dataclass(slots=True)
class _Step:
    """A recorded call.

    Attributes:
        node, key: the path and what is live at its end.
        executable: what runs.
        sources: for each input of the executable the position of the argument leaf or the storage it is read from.
        targets: for each output the storages that keep it.
        results: for each leaf of the return value how to make it: (output position, layout), a storage and
            layout, or a constant.
        spec: how the leaves of the return value nest.
        numbers: floats, ints and complex numbers; ``keys`` are the positions of random keys among the ints.
    """

    node: Node
    key: Any
    executable: runtime.Executable
    sources: list[int | Storage]
    targets: list[list[Storage]]
    results: list[tuple[str, Any, Any]]
    spec: TreeSpec
    numbers: tuple[list[float], list[int], list[complex]]
    keys: list[int]

    def disagreement(self, other: _Step) -> str:
        """Why this call and the one before it are not the same program; empty where they are."""
        if self.node is not other.node or self.key != other.key:
            return "the recorded graph is another in each call"
        if any(a is not b for a, b in zip(self.sources, other.sources, strict=True) if not isinstance(a, int)):
            return "the function makes a tensor outside the device in each call"
        if self.numbers[0] != other.numbers[0] or self.numbers[2] != other.numbers[2] or self._ints() != other._ints():
            return "a number that Python computes changes from call to call"
        return ""

    def _ints(self) -> list[int]:
        random_keys = {i for at in self.keys for i in (at, at + 1)}
        return [x for i, x in enumerate(self.numbers[1]) if i not in random_keys]


class CompiledStep:
    """A function whose calls run as one executable; made by `compile`."""

    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._recorded: dict[Any, list[_Step]] = {}
        self._ready: dict[Any, _Step] = {}
        self._given_up: set[Any] = set()
        found = list(_reachable(function))
        self._optimizers = [x for x in found if isinstance(x, torch.optim.Optimizer)]
        self._modules = [m for x in found if isinstance(x, torch.nn.Module) for m in x.modules()]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        key = self._key(leaves, spec)
        ready = self._ready.get(key)
        if ready is not None and _may_run(ready):
            return _replay(ready, leaves)
        if key in self._given_up or ready is not None:
            return self._function(*args, **kwargs)
        return self._record(key, leaves, args, kwargs)

    def _key(self, leaves: list[Any], spec: TreeSpec) -> Any:
        """What a recorded call depends on besides the contents of tensors."""
        parts = tuple(
            [(resolve(cell_of(x))[1], x.requires_grad) if is_device_tensor(x) else _frozen(x) for x in leaves]
        )
        training = tuple([m.training for m in self._modules])
        return parts, spec, training, torch.is_grad_enabled(), tensor.rebinds

    def _record(self, key: Any, leaves: list[Any], args: Any, kwargs: Any) -> Any:
        for optimizer in self._optimizers:
            _make_capturable(optimizer)
        step.cut("lazytpu.compile")
        before = trace.step
        result = _detached(self._function(*args, **kwargs))
        if trace.step != before:
            self._give_up(key, "the function reads a tensor, which cuts its graph")
            return result
        with record.lock:
            call = _capture(leaves, result)
            step.cut("lazytpu.compile")
        calls = self._recorded.setdefault(key, [])
        calls.append(call)
        if len(calls) > 1:
            problem = call.disagreement(calls[-2])
            if not problem:
                self._ready[key] = call
                del self._recorded[key]
            elif len(calls) >= MAX_RECORDED:
                self._give_up(key, problem)
        return result

    def _give_up(self, key: Any, problem: str) -> None:
        self._given_up.add(key)
        self._recorded.pop(key, None)
        events.not_replayed(getattr(self._function, "__qualname__", repr(self._function)), problem)


def compile(function: Callable[..., Any]) -> CompiledStep:
    """Makes a function of a whole training or inference step run as one executable.

    Args:
        function: takes and returns any nesting of device tensors and constants, and may update parameters,
            buffers and optimizer state that it reaches by itself.  The backward pass belongs inside: what
            it returns carries no gradient.

    Returns:
        A callable with the same arguments.  Its first calls are recorded; later ones with arguments of the
        same shapes, dtypes and constants do not run the function's Python.

    Example:
        >>> @lazytpu.compile
        ... def train_step(x, y):
        ...     optimizer.zero_grad()
        ...     loss = F.cross_entropy(net(x), y)
        ...     loss.backward()
        ...     optimizer.step()
        ...     return loss.detach()
    """
    return CompiledStep(function)


def _capture(leaves: list[Any], result: Any) -> _Step:
    """What is about to be cut, with where its inputs come from and where its outputs go."""
    plan, live, key = step.plan_pending()
    node = trace.cursor
    arguments = {id(resolve(cell_of(x))[0]): i for i, x in reversed(list(enumerate(leaves))) if is_device_tensor(x)}
    inputs = [trace.inputs[i][0] for i in plan.inputs]
    sources = [arguments.get(id(s), s) for s in inputs]
    result_leaves, spec = tree_flatten(result)
    known = {id(s) for s in inputs}
    fresh = {id(resolve(cell_of(x))[0]) for x in result_leaves if is_device_tensor(x)} - known
    positions = {value: i for i, value in enumerate(key[0])}
    targets: list[list[Storage]] = [[] for _ in key[0]]
    for storage in live:
        if id(storage) not in fresh and storage.value.node is not None:
            targets[positions[storage.value]].append(storage)
    results = [_result(x, fresh, positions) for x in result_leaves]
    keys = [n.kwargs["rng"].index for n in plan.executable.graph.nodes if "rng" in n.kwargs]
    numbers = (list(trace.floats), list(trace.ints), list(trace.complexes))
    return _Step(node, key, plan.executable, sources, targets, results, spec, numbers, keys)


def _result(leaf: Any, fresh: set[int], positions: dict[Any, int]) -> tuple[str, Any, Any]:
    if not is_device_tensor(leaf):
        return "constant", leaf, None
    storage, layout = resolve(cell_of(leaf))
    if id(storage) in fresh and storage.value is not None and storage.value in positions:
        return "output", positions[storage.value], (storage.layout, layout)
    return "storage", leaf, None


def _may_run(call: _Step) -> bool:
    """Whether no buffer that would be donated is held by somebody else by now."""
    donated = call.executable.graph.donated
    return not any(isinstance(s, Storage) and s.shared for s in [call.sources[i] for i in donated])


def _replay(call: _Step, leaves: list[Any]) -> Any:
    """Runs a recorded call on the present contents of its sources."""
    with record.lock:
        if trace.cursor.depth:
            step.cut("lazytpu.compile")
        inputs = [_buffer(s if isinstance(s, Storage) else resolve(cell_of(leaves[s]))[0]) for s in call.sources]
        floats, ints, complexes = call.numbers
        if call.keys:
            ints = _with_new_keys(ints, call.keys)
        with uninterrupted():
            outputs = runtime.run(call.executable, inputs, floats, ints, complexes)
            for buffer, targets in zip(outputs, call.targets, strict=True):
                for storage in targets:
                    write_buffer(storage, buffer, len(targets) > 1)
            step.remember(outputs[call.executable.smallest])
    metrics.count("cache_hit")
    metrics.count("step")
    return tree_unflatten([_make_result(r, outputs) for r in call.results], call.spec)


def _buffer(storage: Storage) -> Any:
    return (
        storage.buffer if storage.step != trace.step and storage.buffer is not None else step.buffer_of(storage, "read")
    )


def _with_new_keys(ints: list[int], keys: list[int]) -> list[int]:
    ints = list(ints)
    for position in keys:
        ints[position : position + 2] = record.signed(random.default_generator.next_key())
    return ints


def _make_result(result: tuple[str, Any, Any], outputs: Any) -> Any:
    kind, what, layouts = result
    if kind != "output":
        return what
    root, layout = layouts
    storage = new_storage(root, outputs[what])
    storage.shared = True
    whole = make(storage)
    return whole if layout is root else make_view(whole, storage, layout)


def _detached(result: Any) -> Any:
    leaves, spec = tree_flatten(result)
    return tree_unflatten([x.detach() if isinstance(x, torch.Tensor) and x.requires_grad else x for x in leaves], spec)


def _frozen(x: Any) -> Any:
    try:
        hash(x)
    except TypeError:
        return type(x), repr(x)
    return type(x), x


def _reachable(function: Any) -> Iterator[Any]:
    """Objects the function refers to: what it is bound to, its closure, and the globals it names."""
    yield function
    target = getattr(function, "__func__", function)
    owner = getattr(function, "__self__", None)
    if owner is not None:
        yield owner
        yield from getattr(owner, "__dict__", {}).values()
    for cell in getattr(target, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # a name that is not bound yet
            continue
    code = getattr(target, "__code__", None)
    if code is not None:
        yield from (target.__globals__[name] for name in code.co_names if name in target.__globals__)


def _make_capturable(optimizer: torch.optim.Optimizer) -> None:
    """Moves the step counters of an optimizer to the device, where torch has that form of it."""
    for group in optimizer.param_groups:
        if group.get("capturable") is not False or group.get("fused"):
            continue
        group["capturable"] = True
        for parameter in group["params"]:
            counter = optimizer.state[parameter].get("step") if parameter in optimizer.state else None
            if isinstance(counter, torch.Tensor) and is_device_tensor(parameter):
                optimizer.state[parameter]["step"] = counter.to(parameter.device)
