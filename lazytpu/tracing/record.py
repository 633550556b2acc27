"""Recording: from the arguments of an aten op to a node of the trace tree.

`record` is the whole story in one function, for any op; dispatch/generated.py generates a faster version of the
same for the common shapes of schema.  Both follow one rule, *prepare, then commit*: everything that can
raise, allocate or run other code comes first, and the commit is straight-line bytecode without a call.
CPython lets other threads, signals and finalizers run only between calls, so an op is recorded wholly or
not at all, without a lock on the hot path.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from math import copysign
from typing import TypeGuard

import torch

from lazytpu import random
from lazytpu.diagnosis import events
from lazytpu.ir.op_schema import ABSENT, Arg, Argument, Op, aten, op_of
from lazytpu.ir.tree import Key, Node, Number, Structure, Value, operands, trace
from lazytpu.location import site
from lazytpu.observers import calls_of
from lazytpu.runtime.host.garbage import collect_before_step
from lazytpu.tensors.layout import Layout
from lazytpu.tensors.storage import Alias, Cell, Storage, commit, resolve
from lazytpu.tensors.tensor import LazyTensor, MixedDevicesError
from lazytpu.tracing import dynamic_scalars
from lazytpu.tracing.infer import infer
from lazytpu.tracing.mesh_of_step import on_mesh

lock = threading.RLock()  # held by misses, cuts and everything off the hot path
_KIND = {float: "f", int: "i", bool: "i", complex: "c"}
_NAN = object()
_op_new = calls_of("op_new")
INT64_MAX = (1 << 63) - 1


def load(cell: Cell) -> Value:
    """Return the value of a cell in this step.

    The first use of a storage in a step makes it an input of the graph.  Reading a view records its
    chain of view ops, once until the storage is written again.
    """
    if type(cell) is Storage and cell.step == trace.step:
        found: Value = cell.value
        return found
    with lock:
        while True:
            step = trace.step
            storage, layout = resolve(cell)
            value = storage.value if storage.step == step else _load_storage(storage, step)
            if layout is not storage.layout:
                if storage.reads is None or storage.reads_root is not value or storage.reads_step != step:
                    storage.reads, storage.reads_root, storage.reads_step = {}, value, step
                value = read_view(value, layout, storage.reads)
            if trace.step == step:  # no finalizer has cut the graph in the middle of this
                return value


def _load_storage(storage: Storage, step: int) -> Value:
    layout = storage.layout
    if storage.buffer is None:  # never written: torch.empty
        value = record(EMPTY, [list(layout.size), layout.dtype], layouts=(layout,)).value
        commit({storage: value}, step)
        return value
    trace.refuse_if_closed()
    sharding = storage.sharding
    if sharding is not None and sharding.mesh is not trace.mesh:
        on_mesh(sharding.mesh)
    if not trace.inputs:
        collect_before_step()
    inputs, entry = trace.inputs, (storage, storage.buffer, storage.shared)
    inputs.append(entry)
    index = len(inputs) - 1
    while inputs[index] is not entry:
        index -= 1
    if sharding is not None:
        trace.shardings[index] = sharding
    value = trace.input_value(index, layout, sharding)
    storage.reads = None
    if trace.step == step:
        storage.value = value
        storage.step = step
    return value


EMPTY = op_of(aten.empty.memory_format)
VIEW_OPS = {
    "permute": op_of(aten.permute.default),
    "view": op_of(aten.view.default),
    "as_strided": op_of(aten.as_strided.default),
    "view_dtype": op_of(aten.view.dtype),
    "_conj": op_of(aten._conj.default),
    "_neg_view": op_of(aten._neg_view.default),
}


def read_view(root: Value, layout: Layout, known: dict[Layout, Value]) -> Value:
    """Return the value that lies at ``layout`` where the whole storage holds ``root``.

    Args:
        known: those that were read before; this one and the ones on the way are added.
    """
    if layout.parent is None:
        return root
    value = known.get(layout)
    if value is None:
        value = known[layout] = view_value(read_view(root, layout.parent, known), layout)
    return value


def view_value(source: Value, layout: Layout) -> Value:
    """Record the view op that leads to ``layout`` from its parent's value; the caller holds the lock."""
    node = None
    if layout.read_key is not None:
        trace.refuse_if_closed()
        op, attributes = layout.read_key
        key = (op, source, *attributes)
        try:  # as in generated kernels: from here to the commit no call
            node = trace.cursor.children[key]
            trace.cursor = node
        except KeyError:
            pass
    if node is None:
        node = _record_view(source, layout)
    return node.value


def _record_view(source: Value, layout: Layout) -> Node:
    op = VIEW_OPS[layout.op] if isinstance(layout.op, str) else layout.op
    node = record(op, [source, *layout.args], layouts=(layout,))
    if node.args[0] is source and not any(type(x) is Number for x in operands(node)):
        layout.read_key = (node.key[0], node.key[2:])
    return node


def cell_of(tensor: torch.Tensor) -> Cell:
    """Return the cell of a device tensor, whichever class C++ gave it."""
    found: Cell = tensor._s if type(tensor) is LazyTensor else LazyTensor._s.__get__(tensor, LazyTensor)
    return found


def is_device_tensor(x: object) -> TypeGuard[torch.Tensor]:
    """Return whether ``x`` is a tensor on the lazy device."""
    return type(x) is LazyTensor or isinstance(x, torch.Tensor) and x.device.type == LazyTensor.device_type


def record(op: Op, bound: Sequence[object], *, layouts: tuple[Layout, ...] | None = None) -> Node:
    """Record one op and return its node, on which the cursor then stands.

    Args:
        op: what to record.
        bound: its arguments in the order of the schema, `ABSENT` (or nothing at the end) where not
            given; tensors may be device tensors, 0-dim CPU tensors, cells or values.  Values belong to a
            step: who gives some has to see that it is still the current one when this returns.
        layouts: of the results where the caller knows them.

    Raises:
        Whatever torch raises for these arguments; the cursor then stands where it was.
    """
    with lock:
        trace.refuse_if_closed()
        named = op if layouts is None else (op, *[(lay.size, lay.stride, lay.dtype) for lay in layouts])
        while True:
            step = trace.step
            numbers: list[complex] = []
            key = (named, *[_key(a, b, numbers) for a, b in zip(op.arguments, bound, strict=False)])
            if len(key) <= len(op.arguments):
                key += (ABSENT,) * (len(op.arguments) + 1 - len(key))
            parent = trace.cursor
            node = parent.children.get(key)
            if node is None and parent.dynamic is not None:
                node = dynamic_scalars.known_node(parent, op, key, bound, numbers)
            if node is None:
                node = _miss(parent, op, key, bound, layouts, numbers)
            if op.random:
                numbers += random_numbers(op, bound)
            floats = [v for v in numbers if type(v) is float]
            ints = [v for v in numbers if isinstance(v, int)]
            complexes = [v for v in numbers if type(v) is complex]
            if trace.step == step and node.parent is trace.cursor:
                trace.cursor = node
                trace.floats += floats
                trace.ints += ints
                trace.complexes += complexes
                return node


def random_numbers(op: Op, bound: Sequence[object]) -> list[int]:
    """Return the (seed, counter) of a random op, as int64."""
    position = op.positions.get("generator")
    given = bound[position] if position is not None and position < len(bound) else None
    return signed(random.key_from(given if isinstance(given, torch.Generator) else None))


def signed(key: Iterable[int]) -> list[int]:
    """Return unsigned 64-bit numbers as the int64 of the same bits."""
    return [k - (1 << 64) if k > INT64_MAX else k for k in key]


def _key(argument: Argument, x: Arg, numbers: list[complex]) -> object:
    """Return what stands for an argument in the key; numbers that are inputs are appended to ``numbers``."""
    if x is ABSENT or x is None:
        return x
    kind = argument.kind
    if kind == "tensor":
        return tensor_key(x, numbers)
    if kind == "tensors":
        return tuple([None if e is None else tensor_key(e, numbers) for e in x])
    if kind == "number":
        return number_key(x, numbers)
    if kind == "numbers":
        return tuple([number_key(e, numbers) for e in x])
    if kind == "attr":
        return x
    if kind == "float":
        return float_key(x)
    if kind == "list":
        return tuple(x)
    if kind == "floats":
        return tuple([float_key(e) for e in x])
    if kind == "scalar":
        return type(x), float_key(x) if type(x) is float else x
    return None  # ignored, generator


def tensor_key(x: Arg, numbers: list[complex]) -> object:
    """Return the value of a tensor argument, or the type of a number that stands in for a tensor."""
    cls = type(x)
    if cls is LazyTensor:
        return load(x._s)
    if cls is Value:
        return x
    if isinstance(x, (Storage, Alias)):
        return load(x)
    if isinstance(x, torch.Tensor):
        if x.device.type == LazyTensor.device_type:
            return load(cell_of(x))
        if x.dim() == 0 and x.device.type == "cpu":
            numbers.append(x.item())
            return x.dtype
        raise MixedDevicesError(x.device)
    return number_key(x, numbers)


def number_key(x: Arg, numbers: list[complex]) -> type:
    """Return the type of a number from Python, whose value becomes an input of the graph."""
    if isinstance(x, torch.Tensor):
        x = x.item()
    if type(x) is int and not -INT64_MAX - 1 <= x <= INT64_MAX:
        if x > (1 << 64) - 1 or x < 0:
            raise RuntimeError("value cannot be converted to type int64_t without overflow")
        x -= 1 << 64
    numbers.append(x)
    return type(x)


def float_key(x: Arg) -> object:
    """Return a float that equals itself only: NaN has one key, and -0.0 is not 0.0."""
    if isinstance(x, (Value, Storage, Alias)):
        return x
    if x != x:
        return _NAN
    return x if x != 0 or copysign(1.0, x) > 0 else "-0.0"


def _miss(
    parent: Node, op: Op, key: Key, bound: Sequence[Arg], layouts: tuple[Layout, ...] | None, numbers: list[complex]
) -> Node:
    """Return the node for a key the children of ``parent`` lack: made now, or one that takes a number as an input.

    Other threads find their ops and move the cursor meanwhile, so all of this is about ``parent``; whether the cursor
    still stands there is seen when the node is committed.
    """
    node = _new_node(parent, op, key, bound, layouts, ())
    other, changed = dynamic_scalars.node_with_other_scalars(node)
    trace.shadow = other
    if changed and other is not None:
        dynamic_scalars.set_aside(other)
        positions = dynamic_scalars.remember(parent, op, changed)
        for position in changed:
            events.made_dynamic(op.name, op.arguments[position].name, node.site.describe())
        known = dynamic_scalars.known_node(parent, op, key, bound, numbers)
        if known is not None:
            return known
        key = dynamic_scalars.key_of(positions, key, bound)
        node = _new_node(parent, op, key, bound, layouts, positions)
        numbers += [bound[position] for position in positions]
    for notify in tuple(_op_new):
        notify(node)
    if trace.diverged is None:
        trace.diverged = (parent, node)
    parent.children[key] = node
    trace.nodes += 1
    return node


def _new_node(
    parent: Node,
    op: Op,
    key: Key,
    bound: Sequence[Arg],
    layouts: tuple[Layout, ...] | None,
    dynamic: Sequence[int],
) -> Node:
    counts = list(parent.counts)
    args = [_operand(a, b, k, counts) for a, b, k in zip(op.arguments, bound, key[1:], strict=False)]
    for position in dynamic:
        args[position] = _number(type(bound[position]), counts)
    node = Node(parent)
    node.op, node.key, node.site = op, key, site.here(parent.site, op)
    node.args, node.kwargs = op.call_form(args)
    if op.random:
        node.kwargs["rng"] = Number("i", counts[1], "rng")
        counts[1] += 2
    node.counts = (counts[0], counts[1], counts[2])
    if layouts is not None:
        node.set_results(layouts, 0)
    else:
        results, structure, node.natural = infer(op, node)
        node.set_results(results, structure)
    return node


def _operand(argument: Argument, x: Arg, key: Arg, counts: list[int]) -> object:
    """Return what a node keeps of an argument; a number that is an input takes its place in ``counts``."""
    if x is ABSENT or x is None:
        return x
    kind = argument.kind
    if kind in ("tensor", "number"):
        return key if type(key) is Value else _number(key, counts)
    if kind in ("tensors", "numbers"):
        return [k if k is None or type(k) is Value else _number(k, counts) for k in key]
    if kind in ("ignored", "generator"):
        return ABSENT
    return list(x) if kind in ("list", "floats") else x


def _number(key: Arg, counts: list[int]) -> Number:
    kind = _KIND.get(key)
    if kind is None:
        kind = "c" if key.is_complex else "f" if key.is_floating_point else "i"
    at = "fic".index(kind)
    number = Number(kind, counts[at], key)
    counts[at] += 1
    return number


def results_of(node: Node, wrap: Callable[[Value], object]) -> Arg:
    """Return the results of a node, nested as the op returns them, ``wrap`` applied to each value."""
    return _build(node.structure, node.values, wrap)


# Not a function inside `results_of`: one that calls itself is a reference cycle, which would keep what `wrap`
# refers to until the garbage collector comes by, and what is kept is computed.
def _build(structure: Structure, values: Sequence[Value | None], wrap: Callable[[Value], object]) -> Arg:
    if isinstance(structure, int):
        value = values[structure]
        return None if value is None else wrap(value)
    return type(structure)([_build(s, values, wrap) for s in structure])
