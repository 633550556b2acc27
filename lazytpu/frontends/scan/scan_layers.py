"""`scan_layers`: equal layers, one after the other, as one loop that is compiled once whatever their number.

The first layer runs once, forward and backward, on tensors that stand for one iteration of the loop.  What it records
on a path of its own becomes two bodies: the forward one also gives what the backward one needs of it, or, where that
is to be computed again, the backward one begins with the forward one's ops.  Two nodes in the graph hold them.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint as checkpointed

from lazytpu.errors import LazyTPUError
from lazytpu.frontends.scan.bodies import Bodies, numbers_of, partition
from lazytpu.frontends.scan.layers import differences, tensors_of
from lazytpu.ir.op_schema import Arg, Argument, Op
from lazytpu.ir.sharding import Mesh
from lazytpu.ir.tree import Node, Value, trace
from lazytpu.lowering.rules.scan import backward_op, forward_op
from lazytpu.random import default_generator
from lazytpu.runtime import meshes
from lazytpu.tensors.layout import Layout, in_rows, layout_of, root_layout
from lazytpu.tensors.storage import Storage, new_storage
from lazytpu.tensors.tensor import make
from lazytpu.tracing.record import cell_of, is_device_tensor, load, lock, record
from lazytpu.tracing.sharding import laid_out, of_examples
from lazytpu.tracing.transaction import Transaction

_KEY = root_layout((2,), (1,), torch.int64)


def scan_layers(layers: Sequence[nn.Module], x: torch.Tensor, *args: Any, checkpoint: bool = False) -> torch.Tensor:
    """Apply layers of equal structure one after the other, compiled as one loop.

    ``for layer in layers: x = layer(x, *args)``, with gradients, but the time to compile does not grow with the
    number of layers.  Dropout draws other numbers in each.

    Args:
        layers: modules of one class with parameters of the same names, types and settings.
        x: what the first layer takes.  Each layer gives a tensor of the same shape and dtype.
        args: further arguments, the same for each layer: a mask, for example.
        checkpoint: keep only what goes from layer to layer, and compute the rest again in the backward pass.

    Returns:
        The result of the last layer.  On tensors of another device this is the plain loop.

    Raises:
        ValueError: the layers differ, or a layer gives another type than it takes.
        LazyTPUError: a layer reads a tensor, writes to one (batch norm's statistics), or keeps one.

    Example:
        >>> for block in self.blocks:             # instead of this  # doctest: +SKIP
        ...     x = block(x, mask)
        >>> x = lazytpu.scan_layers(self.blocks, x, mask)  # doctest: +SKIP
    """
    layers = list(layers)
    found = differences(layers)
    if found:
        raise ValueError(f"scan_layers: the layers differ: {found}")
    if not layers or not is_device_tensor(x):
        for layer in layers:
            x = checkpointed(layer, x, *args, use_reentrant=False) if checkpoint else layer(x, *args)
        return x
    own = [list(tensors_of(layer).values()) for layer in layers]
    constants = [a for a in args if is_device_tensor(a)]
    iteration = _Iteration(layers[0], x, args, checkpoint)
    flat = [t for tensors in own for t in tensors]
    return _Scan.apply(iteration, len(layers), x, *constants, *flat)  # type: ignore[no-any-return, no-untyped-call]


_roots: dict[torch.dtype, Node] = {}  # by torch's default dtype, which decides types and is in no key
_stand_ins: dict[tuple[int, Layout], Value] = {}
_bodies: dict[object, Bodies] = {}
_MAX_BODIES = 256
_ATTEMPTS = 20


class _Iteration:
    """One iteration of the loop, recorded in isolation.

    Attributes:
        bodies: what it was made into.
        numbers: from Python, in the order the bodies take them.
        layout: of what goes from layer to layer.
    """

    def __init__(self, layer: nn.Module, x: torch.Tensor, args: Sequence[Any], checkpoint: bool) -> None:
        own = tensors_of(layer)
        constants = [a for a in args if is_device_tensor(a)]
        self.constants = len(constants)
        self._made: list[tuple[Storage, Value]] = []
        with _apart() as lists:
            graded = torch.is_grad_enabled()
            given = [self._stand_in(t) for t in (x, *constants, *own.values())]
            if graded:
                given[0].requires_grad_(x.is_floating_point() or x.is_complex())
            values = [v for _, v in self._made]
            names, replaced = list(own), iter(given[1 : 1 + len(constants)])
            named = dict(zip(names, given[1 + len(constants) :], strict=True))
            arguments = [next(replaced) if is_device_tensor(a) else a for a in args]
            result = torch.func.functional_call(layer, named, (given[0], *arguments))
            self.layout = _check_result(result, given[0])
            y, end = load(cell_of(result)), trace.cursor
            wanted = [i for i, t in enumerate(given) if t.requires_grad] if result.requires_grad else []
            gradients: list[Value | None] = []
            seed: Value | None = None
            if wanted:
                _check_leaves(result, given)
                grad = self._stand_in(result)
                seed = self._made[-1][1]
                found = torch.autograd.grad(result, [given[i] for i in wanted], grad, allow_unused=True)
                gradients = [None if g is None else load(cell_of(g)) for g in found]
                del found, grad
            last, floats, ints, complexes = trace.cursor, trace.floats, trace.ints, trace.complexes
            del result, given, named, replaced, arguments
            self._check_written()
        numbers, positions = numbers_of(last, floats, ints, complexes)
        self.numbers = numbers
        key = (last, end, y, tuple(gradients), tuple(values), tuple(wanted), len(constants), checkpoint)
        bodies = _bodies.get(key)
        if bodies is None:
            _check_alive(lists)
            if len(_bodies) >= _MAX_BODIES:
                _bodies.clear()
            found_by_position = dict(zip(wanted, gradients, strict=True))
            bodies = _bodies[key] = partition(
                end, last, y, values, seed, found_by_position, positions, len(constants), checkpoint
            )
        self.bodies = bodies

    def _stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of the same type whose value is an argument of the body."""
        layout = _layout_of(tensor)
        position = len(self._made)
        value = _stand_ins.get((position, layout))
        if value is None:
            value = _stand_ins[position, layout] = Value(None, -1 - position, layout)
        storage = new_storage(layout)
        storage.value, storage.step = value, trace.step
        self._made.append((storage, value))
        made = make(storage)
        made.requires_grad_(tensor.requires_grad and torch.is_grad_enabled())
        return made

    def _check_written(self) -> None:
        for storage, value in self._made:
            if storage.value is not value:
                raise LazyTPUError(
                    "scan_layers: a layer writes to a parameter, a buffer or an argument",
                    at=storage.value.node.site.text if storage.value.node is not None else "",
                    fix="use layers without such buffers (layer norm for batch norm), or a plain loop",
                )


def _check_result(result: Any, x: torch.Tensor) -> Layout:
    if not is_device_tensor(result):
        raise ValueError(f"scan_layers: a layer returns a {type(result).__name__}, not a tensor of the device")
    if result.shape != x.shape or result.dtype != x.dtype:
        raise ValueError(
            f"scan_layers: a layer takes {tuple(x.shape)} of {x.dtype} "
            f"and gives {tuple(result.shape)} of {result.dtype}"
        )
    return _layout_of(x)


def _check_leaves(result: torch.Tensor, given: Sequence[torch.Tensor]) -> None:
    """Refuse tensors from outside that need a gradient, which would be lost."""
    known, seen = {id(t) for t in given}, set()
    waiting = [result.grad_fn]
    while waiting:
        function = waiting.pop()
        if function is None or function in seen:
            continue
        seen.add(function)
        variable = getattr(function, "variable", None)
        if variable is not None and id(variable) not in known:
            raise LazyTPUError(
                f"scan_layers: a layer uses a tensor of {tuple(variable.shape)} "
                "that needs a gradient and is not its own",
                fix="give it as a further argument of scan_layers",
            )
        waiting += [f for f, _ in function.next_functions]


@contextmanager
def _apart() -> Iterator[list[object]]:
    """Record on a path of its own; the outer path goes on afterwards as if nothing had been.

    Yields a list that holds weak references to the storages of the path, once it is over.
    """
    state = trace.cursor, trace.floats, trace.ints, trace.complexes, trace.diverged, trace.shadow
    step, counter = trace.step, default_generator.counter
    left: list[object] = []
    before = [(s, s.value) for s in trace.pending]
    collecting = gc.isenabled()
    gc.disable()  # finalizers may cut
    root = _roots.setdefault(torch.get_default_dtype(), Node(None))
    trace.cursor, trace.floats, trace.ints, trace.complexes, trace.isolated = root, [], [], [], True
    try:
        yield left
    finally:
        trace.isolated = False
        trace.cursor, trace.floats, trace.ints, trace.complexes, trace.diverged, trace.shadow = state
        default_generator.counter = counter
        for storage in trace.pending[len(before) :]:
            storage.value, storage.step, storage.dirty, storage.reads = None, 0, 0, None
            left.append(weakref.ref(storage))
        del trace.pending[len(before) :]
        storage = None
        changed = [s for s, v in before if s.step == step and s.value is not v]
        for storage, value in before:
            storage.value = value
        if collecting:
            gc.enable()
    if changed:
        raise LazyTPUError("scan_layers: a layer writes to a tensor that is not its own", fix="use a plain loop")


def _check_alive(left: Sequence[Any]) -> None:
    """Refuse layers that keep a tensor which belongs to no path."""
    for attempt in range(_ATTEMPTS):
        kept = [s for s in [reference() for reference in left] if s is not None]
        if not kept:
            return
        del kept
        gc.collect()
        time.sleep(0.001 * attempt)  # autograd's thread may hold the last of them for a moment
    kept = [s for s in [reference() for reference in left] if s is not None]
    if kept:
        raise LazyTPUError(
            "scan_layers: a layer keeps a tensor, or writes to one that is not its own",
            given=repr(kept[0].layout),
            fix="use a plain loop",
        )


def _op(overload: Any, arguments: dict[str, str], random: bool = False) -> Op:
    given = tuple([Argument(name, kind, False, None, False) for name, kind in arguments.items()])
    positions = {a.name: i for i, a in enumerate(given)}
    return Op(overload, overload, overload._schema.name.replace("::", "."), given, None, random, positions)


_LISTS = {"parameters": "tensors", "constants": "tensors", "numbers": "tensors"}
_FORWARD = [
    _op(forward_op, {"body": "attr", "x": "tensor", **_LISTS, "layers": "attr", "kept": "attr"}, random)
    for random in (False, True)
]
_BACKWARD = _op(
    backward_op,
    {"body": "attr", "grad": "tensor", "saved": "tensors", **_LISTS}
    | {"key": "tensors", "layers": "attr", "sums": "attr"},
)


def _record(op: Op, bound: Sequence[Arg], layouts: tuple[Layout, ...]) -> list[torch.Tensor]:
    """Record a node and give all its results as new tensors."""
    with lock:
        transaction = Transaction()
        while transaction.open():
            made = transaction.write_new(record(op, bound, layouts=layouts).values)
    return [make(storage) for storage in made.values()]


def _tensor_of(value: Value) -> torch.Tensor:
    """Return a tensor that holds a value of the path."""
    storage = new_storage(layout_of(value.layout).root)
    with lock:
        transaction = Transaction()
        while transaction.open():
            transaction.write(storage, value)
    return make(storage)


def _stacked(layout: Layout, layers: int) -> Layout:
    return in_rows((layers, *layout.size), layout.dtype)


class _Scan(torch.autograd.Function):
    """The loop and its gradient."""

    @staticmethod
    def forward(ctx: Any, iteration: _Iteration, layers: int, x: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        bodies = iteration.bodies
        constants, own = tensors[: iteration.constants], tensors[iteration.constants :]
        captured = [_tensor_of(v) for v in bodies.captured]
        layouts = (iteration.layout, *[_stacked(v, layers) for v in bodies.kept], *[_KEY] * bodies.random)
        examples = of_examples(x) if meshes.used else None
        x = _split(x, examples)
        bound = [bodies.forward, x, own, [*constants, *captured], iteration.numbers, layers, len(bodies.kept)]
        y, *saved = _record(_FORWARD[bodies.random], bound, layouts)
        ctx.iteration, ctx.layers, ctx.saved, ctx.examples = iteration, layers, len(saved), examples
        ctx.save_for_backward(*saved, *captured, *tensors)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        iteration, layers = ctx.iteration, ctx.layers
        bodies: Bodies = iteration.bodies
        assert bodies.backward is not None
        saved, rest = ctx.saved_tensors[: ctx.saved], ctx.saved_tensors[ctx.saved :]
        captured, tensors = rest[: len(bodies.captured)], rest[len(bodies.captured) :]
        constants, own = tensors[: iteration.constants], tensors[iteration.constants :]
        each = len(own) // layers
        kept, key = saved[: len(bodies.kept)], saved[len(bodies.kept) :]
        grad = _split(grad, ctx.examples)
        layouts = (iteration.layout, *[_layout_of(constants[i]) for i in bodies.sums])
        layouts += tuple([_stacked(_layout_of(own[i]), layers) for i in bodies.learned])
        bound = [bodies.backward, grad, kept, own, [*constants, *captured], iteration.numbers, key, layers, bodies.sums]
        dx, *found = _record(_BACKWARD, bound, layouts)
        of_constants: list[torch.Tensor | None] = [None] * len(constants)
        of_own: list[torch.Tensor | None] = [None] * len(own)
        for i, g in zip(bodies.sums, found, strict=False):
            of_constants[i] = g
        for i, stacked in zip(bodies.learned, found[len(bodies.sums) :], strict=True):
            of_own[i::each] = stacked.unbind(0)  # views: a slice for each would be a kernel to compile for each
        return None, None, dx, *of_constants, *of_own


def _split(x: torch.Tensor, examples: tuple[Mesh, tuple[str, ...]] | None) -> torch.Tensor:
    """Keep the examples split in a loop, where XLA would split what weights that lie in parts are multiplied with."""
    if examples is None:
        return x
    mesh, axes = examples
    return laid_out(x, mesh, (axes, *[...] * (x.dim() - 1)))


def _layout_of(tensor: torch.Tensor) -> Layout:
    return in_rows(tuple(tensor.shape), tensor.dtype)
