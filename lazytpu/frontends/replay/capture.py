"""From a recorded call of a function to a `RecordedCall`: where its inputs came from and where its results went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from lazytpu.frontends.replay.recorded_call import Gradient, RecordedCall, Returned
from lazytpu.frontends.replay.replay import grad_of
from lazytpu.ir.graph import Graph, graph_of
from lazytpu.ir.tree import Node, Number, Value, operands, trace
from lazytpu.passes.merge import merged
from lazytpu.passes.result_shardings import with_shardings
from lazytpu.random import default_generator
from lazytpu.runtime import index_checks
from lazytpu.tensors.storage import Storage, resolve
from lazytpu.tensors.tensor import lazy
from lazytpu.tracing import planning
from lazytpu.tracing.record import cell_of, is_device_tensor

_SMALL = 1 << 14  # bytes of a gradient up to which copying it costs less than an array of its own
_MANY = 16


class Capture:
    """Decides what the cut after a call runs (a `planning.Planner`), and keeps it as ``call``.

    Attributes:
        call: None before the cut, and where nothing is left of the call.
    """

    def __init__(self, leaves: Sequence[Any], result: Any, parameters: Sequence[torch.Tensor], draws: Any) -> None:
        """Take note of a call.

        Args:
            leaves: the leaves of the arguments.
            result: what was returned.
            parameters: tensors whose gradients the call may set.
            draws: seed and counter of the default generator before the call.
        """
        self.call: RecordedCall | None = None
        self._leaves, self._result, self._parameters, self._draws = leaves, result, parameters, draws

    def __call__(self, live: list[Storage], key: Any) -> planning.Plan:
        """Return the plan, for a graph in which the inputs that share a buffer are one."""
        path = trace.cursor
        checked = index_checks.checked_nodes(path) if any(key[2:3]) else ()
        graph = graph_of(path, key[0], key[1], checked)
        same = {} if graph.checked else _one_buffer(graph.inputs)
        spread: tuple[int, ...] = tuple(range(len(graph.outputs)))
        if not graph.checked:
            graph, spread = merged(graph, same)
        if trace.mesh is not None:
            wanted = dict(zip(spread, key[3], strict=True))
            graph = with_shardings(graph, [wanted[i] for i in range(len(graph.outputs))], trace.mesh)
        elif not graph.checked:
            graph, spread = self._with_packed_gradients(graph, spread, live, key[0])
        executable = planning.executable_of(graph, key)
        plan = planning.Plan(executable, tuple([v.index for v in graph.inputs]), spread)
        slots = dict(zip(key[0], spread, strict=True))
        arguments = {id(s): i for i, s in reversed(list(enumerate(map(_storage, self._leaves)))) if s is not None}
        inputs = [trace.inputs[i][0] for i in plan.inputs]
        equals: dict[Value, list[Storage]] = {}
        for value, kept in same.items():
            equals.setdefault(kept, []).append(trace.inputs[value.index][0])
        numbers = (list(trace.floats), list(trace.ints), list(trace.complexes))
        call = RecordedCall(
            path,
            key,
            executable,
            [arguments.get(id(s), s) for s in inputs],
            [equals.get(v, []) for v in graph.inputs],
            [[] for _ in graph.outputs],
            [[] for _ in graph.outputs],
            [],
            [],
            lambda made: None,
            numbers,
            _random_keys(path),
        )
        self._sort(call, live, slots, arguments)
        self.call = call
        return plan

    def _with_packed_gradients(
        self, graph: Graph, spread: tuple[int, ...], live: list[Storage], values: tuple[Value, ...]
    ) -> tuple[Graph, tuple[int, ...]]:
        """Return the graph with its small new gradients as one result, if they are many; they are seldom looked at."""
        grads = {id(_storage(grad_of(p))) for p in self._parameters}
        holders = Counter(s.value for s in live)
        places = Counter(spread)
        found: dict[torch.dtype, list[int]] = {}
        fresh = {s.value for s in live if id(s) in grads and s.buffer is None and holders[s.value] == 1}
        for value, place in zip(values, spread, strict=True):
            if value in fresh and places[place] == 1 and 0 < value.layout.nbytes <= _SMALL:
                found.setdefault(value.layout.dtype, []).append(place)
        packed = max(found.values(), key=len, default=[])
        if len(packed) < _MANY:
            return graph, spread
        order = [i for i in range(len(graph.outputs)) if i not in {*packed}] + packed
        graph = replace(graph, outputs=tuple([graph.outputs[i] for i in order]), concatenated=len(packed))
        return graph, tuple([order.index(i) for i in spread])

    def _sort(
        self, call: RecordedCall, live: list[Storage], slots: dict[Value, int], arguments: dict[int, int]
    ) -> None:
        """Find out who keeps each output."""
        known = {id(s) for s in call.sources if not isinstance(s, int)}
        fresh: dict[int, int] = {}
        for storage in live:
            value = storage.value
            if value.node is None:
                if storage.buffer is not trace.inputs[value.index][1]:
                    call.problem = "a tensor takes over the contents of another (copy_ of what nothing was done to)"
            elif id(storage) in arguments:
                call.leaves[slots[value]].append(arguments[id(storage)])
            elif id(storage) in known or storage.buffer is not None:
                call.written[slots[value]].append(storage)
            else:
                fresh[id(storage)] = slots[value]
        self._gradients(call, fresh)
        leaves, spec = tree_flatten(self._result)
        first: dict[int, int] = {}
        for position, x in enumerate(leaves):
            seen = first.setdefault(id(x), position) if isinstance(x, torch.Tensor) else position
            call.results.append(
                self._returned(call, x, fresh, arguments) if seen == position else Returned("same", seen)
            )
        call.structure = (lambda made: made[0]) if spec.is_leaf() else (lambda made: tree_unflatten(made, spec))
        explained = {id(g.storage) for g in call.gradients} | {id(_storage(x)) for x in leaves}
        for storage in live:
            if id(storage) in fresh and id(storage) not in explained:
                node = storage.value.node
                assert node is not None  # nothing fresh is an input
                call.unexplained = True
                call.problem = f"a tensor of the call is kept after it: the result of {_place(node)}"
        seed, counter = self._draws
        if (default_generator.seed, default_generator.counter) != (seed, counter + len(call.keys)):
            call.problem = "the function sets the seed, or draws from a torch.Generator"

    def _gradients(self, call: RecordedCall, fresh: dict[int, int]) -> None:
        for parameter in self._parameters:
            grad = grad_of(parameter)
            if not is_device_tensor(grad):
                continue
            storage, layout = resolve(cell_of(grad))
            if id(storage) in fresh:
                call.gradients.append(Gradient(parameter, lazy(grad), storage, layout, fresh[id(storage)]))
            else:
                call.kept_gradients.append((parameter, lazy(grad)))

    def _returned(self, call: RecordedCall, x: Any, fresh: dict[int, int], arguments: dict[int, int]) -> Returned:
        """Return how a leaf of the return value is made, one that is no tensor of the leaves before it."""
        if not is_device_tensor(x):
            if isinstance(x, torch.Tensor):
                call.problem = "the function returns a tensor of the CPU"
            return Returned("constant", x)
        for position, leaf in enumerate(self._leaves):
            if x is leaf:
                return Returned("argument", position)
        storage, layout = resolve(cell_of(x))
        if id(storage) in arguments:
            return Returned("leaf view", arguments[id(storage)], layout)
        for i, gradient in enumerate(call.gradients):
            if gradient.storage is storage:
                return Returned("grad", i) if x is gradient.tensor else Returned("grad view", i, layout)
        if id(storage) in fresh:
            memory = [*fresh].index(id(storage))  # of two that hold the same value each has its own
            return Returned("output", fresh[id(storage)], layout, x.requires_grad, memory)
        if storage.buffer is None:
            call.problem = "the function returns a tensor without contents"
        return Returned("kept", x)


def _storage(x: object) -> Storage | None:
    return resolve(cell_of(x))[0] if is_device_tensor(x) else None


def _one_buffer(inputs: Sequence[Value]) -> dict[Value, Value]:
    """Return for scalars among the inputs the first one that has the same buffer and type."""
    first: dict[Any, Value] = {}
    same = {}
    for value in inputs:
        if not value.layout.size:
            kept = first.setdefault((id(trace.inputs[value.index][1]), value.layout), value)
            if kept is not value:
                same[value] = kept
    return same


def _random_keys(path: Node) -> list[int]:
    """Return positions of the keys of all random ops among the ints, those whose results nobody wants too."""
    return [node.kwargs["rng"].index for node in path.path() if "rng" in node.kwargs]


def _place(node: Node) -> str:
    return f"{node.op.name} at {node.site.text}" if node.site.text else str(node.op.name)


def difference(old: RecordedCall, new: RecordedCall, explained: Collection[int] = ()) -> str:
    """Return why two recorded calls are not one program, with the op and the line; empty where they are.

    Args:
        explained: positions of floats that may differ.
    """
    return (
        _other_graph(old, new)
        or _other_tensors(old, new)
        or _other_numbers(old, new, explained)
        or ("" if _returns(old) == _returns(new) else "the function returns something else")
    )


def _other_graph(old: RecordedCall, new: RecordedCall) -> str:
    if old.executable is new.executable or old.executable.graph.key == new.executable.graph.key:
        return ""
    a, b = old.path.path(), new.path.path()
    for i, (x, y) in enumerate(zip(a, b, strict=False), 1):
        if x is not y:
            what = f"was {x.op.name}" if x.op is not y.op else "has other arguments"
            return f"op {i} {what}: {_place(y)}" if x.op is y.op else f"op {i} {what} and is {_place(y)}"
    if len(a) != len(b):
        more = a if len(a) > len(b) else b
        return f"the graph {'goes on with' if more is b else 'ends before'} {_place(more[min(len(a), len(b))])}"
    changed = [v for v in set(old.key[0]) ^ set(new.key[0]) if v.node is not None]
    if changed:
        node = min([v.node for v in changed if v.node is not None], key=lambda n: n.depth)
        return f"the result of {_place(node)} is kept in one call and not in the other"
    return "other tensors may be overwritten"


def _other_tensors(old: RecordedCall, new: RecordedCall) -> str:
    for i, (a, b) in enumerate(zip(old.sources, new.sources, strict=True)):
        if a is not b and a != b:
            value = new.executable.graph.inputs[i]
            users = [n for n in new.executable.graph.nodes if value in operands(n)]
            where = f", used by {_place(users[0])}" if users else ""
            return f"another tensor is read in each call ({value.layout!r}{where}); was it made on the CPU in the call?"
    if old.written != new.written or old.leaves != new.leaves or old.equals != new.equals:
        return "other tensors are written in each call"
    if [(g.slot, g.layout) for g in old.gradients] != [(g.slot, g.layout) for g in new.gradients]:
        return "other parameters get gradients in each call"
    return ""


def _returns(call: RecordedCall) -> list[Returned]:
    return [
        result._replace(what=repr(result.what)) if result.kind == "constant"
        else result._replace(what=id(_storage(result.what))) if result.kind == "kept"
        else result
        for result in call.results
    ]  # fmt: skip


def _other_numbers(old: RecordedCall, new: RecordedCall, explained: Collection[int]) -> str:
    random = {i for at in new.keys for i in (at, at + 1)}
    before: tuple[Sequence[Any], ...] = old.numbers
    after: tuple[Sequence[Any], ...] = new.numbers
    for kind, a, b in zip("fic", before, after, strict=True):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            allowed = random if kind == "i" else explained if kind == "f" else ()
            if not (x == y or (x != x and y != y)) and i not in allowed:
                place = next(
                    (_place(n) for n in new.path.path() for o in operands(n)
                     if type(o) is Number and o.kind == kind and o.index == i), "an op",
                )  # fmt: skip
                return f"a number that Python computes changes from call to call: {x!r}, then {y!r}, in {place}"
    return ""


def draws_so_far() -> tuple[int, int]:
    """Return seed and counter of the default generator."""
    return default_generator.seed, default_generator.counter
