"""The hot path of optimizers: ``_foreach`` ops, which take hundreds of tensors in one call.

The same as general.py's forms, with what they do for one tensor done for a list at a time, most of it in loops
of C.  Both kernels prepare, then commit, as tracing/record.py explains: the commit ends with its only call, of a
loop that runs no Python code, so an op of any length takes effect wholly or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any

from torch.autograd.graph import increment_version

from lazytpu.ir.op_schema import ABSENT, Arg, Op
from lazytpu.ir.tree import Key, trace
from lazytpu.tensors.layout import layout_of
from lazytpu.tensors.storage import Storage
from lazytpu.tensors.tensor import make
from lazytpu.tracing.record import INT64_MAX, load, lock
from lazytpu.tracing.transaction import cut_if_oversized

Kernel = Callable[..., Any]
_KINDS = {"tensors", "number", "numbers"}


def can_take(op: Op) -> bool:
    """Return whether the schema is of lists of tensors and numbers, a list of tensors first."""
    arguments = op.arguments
    return bool(arguments) and arguments[0].kind == "tensors" and {a.kind for a in arguments} <= _KINDS


def in_place(op: Op, general: Kernel) -> Kernel:
    """Return the kernel of an op that writes its first list and returns nothing.

    Targets that are views or overlap, and whatever else is off the beaten path, go to ``general``.
    """

    def kernel(*args: Any, **kwargs: Any) -> None:
        bound = op.bind(args, kwargs)
        with lock:
            cut_if_oversized()
            step = trace.step
            try:
                cells = [t._s for t in bound[0]]
                targets = set(cells)
                plain = len(targets) == len(cells) and not [c for c in cells if c.moved is not None]
            except AttributeError:  # a tensor of C++, or a view
                plain = False
            key, floats, ints = _key(op, bound, targets) if plain else (None, [], [])
            if key is None:
                general(*args, **kwargs)
                return
            fresh = [c for c in cells if c.dirty != step]
            trace.pending.extend(fresh)  # before they are marked, or an interrupt would lose what is written to them
            for c in fresh:
                c.dirty = step
            node = trace.cursor.children.get(key)
            if node is None:
                general(*args, **kwargs)
                return
            point = map(setattr, cells, repeat("value"), node.values)  # the storages at the results, when it is run
            if trace.step != step or trace.cursor is not node.parent:
                general(*args, **kwargs)
                return
            trace.cursor = node
            trace.floats += floats
            trace.ints += ints
            any(point)
        increment_version(bound[0])

    return kernel


def functional(op: Op, general: Kernel) -> Kernel:
    """Return the kernel of an op that returns a list of new tensors."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        bound = op.bind(args, kwargs)
        with lock:
            cut_if_oversized()
            step = trace.step
            key, floats, ints = _key(op, bound, set())
            node = None if key is None else trace.cursor.children.get(key)
            if node is None or node.structure != [*range(len(node.values))]:
                return general(*args, **kwargs)
            made = [Storage() for _ in node.values]
            for storage, value in zip(made, node.values, strict=True):
                assert value is not None  # a list has no undefined results
                storage.value, storage.layout, storage.dirty = value, layout_of(value.layout), step
            trace.pending.extend(made)
            begin = map(setattr, made, repeat("step"), repeat(step))
            if trace.step != step or trace.cursor is not node.parent:
                return general(*args, **kwargs)
            trace.cursor = node
            trace.floats += floats
            trace.ints += ints
            any(begin)
        return [make(storage) for storage in made]

    return kernel


def _key(op: Op, bound: Sequence[Arg], targets: set[object]) -> tuple[Key | None, list[float], list[int]]:
    """Return the key of the op and the numbers that are inputs; None for what only the general kernel takes.

    Args:
        targets: the storages that the op writes, which only the first argument may reach.
    """
    step = trace.step
    parts: list[object] = [op]
    floats: list[float] = []
    ints: list[int] = []
    for argument, x in zip(op.arguments, bound, strict=True):
        if argument.kind == "tensors":
            try:
                cells = [t._s for t in x]
                if parts[1:] and not targets.isdisjoint([c if type(c) is Storage else c.storage for c in cells]):
                    return None, floats, ints
            except AttributeError:  # a tensor of C++, or of another device
                return None, floats, ints
            parts.append(tuple([c.value if c.step == step else load(c) for c in cells]))
        elif x is ABSENT:
            parts.append(x)
        elif argument.kind == "numbers":
            kinds = tuple(map(type, x))
            if kinds.count(float) != len(kinds):
                return None, floats, ints
            parts.append(kinds)
            floats += x
        elif type(x) is float:
            parts.append(float)
            floats.append(x)
        elif type(x) is int and -INT64_MAX <= x <= INT64_MAX:
            parts.append(int)
            ints.append(x)
        else:
            return None, floats, ints
    return tuple(parts) if trace.step == step else None, floats, ints
