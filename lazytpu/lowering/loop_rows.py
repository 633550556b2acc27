"""Run a `Loop` as ``lax.scan``.

What its iterations make is an array with a row for each, which is taken apart only if needed: whoever needs the results
of all of them, as a later loop or ``torch.stack`` do, gets the array as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from lazytpu.dtypes import to_numpy
from lazytpu.ir.op_schema import Arg
from lazytpu.ir.tree import Node, Value
from lazytpu.lowering.loop_bodies import Loop
from lazytpu.lowering.loops import FEWEST_ITERATIONS

aten = torch.ops.aten
Function: TypeAlias = Callable[..., tuple[jax.Array, ...]]
"""Of the inputs of a graph and its floats, ints and complex numbers."""


Rows: TypeAlias = dict[Value, tuple[jax.Array, int]]
"""Values that are rows of arrays: the array, and which of its rows."""


def row(rows: Rows, value: Value) -> jax.Array:
    """Return the row that a value is."""
    array, index = rows[value]
    return lax.index_in_dim(array, index, keepdims=False)


def can_take(rows: Rows, node: Node) -> bool:
    """Return whether a node puts rows side by side, or takes an array apart into many."""
    op = node.op.recorded
    if op is aten.unbind.int:
        return len(node.values) >= FEWEST_ITERATIONS
    if op not in (aten.stack.default, aten.cat.default) or node.natural is not None:
        return False
    values = node.args[0]
    return any(v in rows for v in values) and len({(v.layout.size, v.layout.dtype) for v in values}) == 1


def take(rows: Rows, node: Node, array_of: Callable[[Value], jax.Array]) -> dict[Value, jax.Array]:
    """Run such a node; return its results, but for those that are added to the rows."""
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", 0)
    if node.op.recorded is aten.unbind.int:
        array = jnp.moveaxis(array_of(node.args[0]), dim, 0)
        rows.update((v, (array, i)) for i, v in enumerate(node.values) if v is not None)
        return {}
    size = node.value.layout.size
    together = jnp.moveaxis(_side_by_side(rows, node.args[0], array_of), 0, dim % len(size))
    return {node.value: together.reshape(size)}


def _side_by_side(rows: Rows, values: Sequence[Value], array_of: Callable[[Value], jax.Array]) -> jax.Array:
    """Return values of one type as the rows of an array."""
    parts = [
        array if array is not None else jnp.stack([array_of(v) for v in part]) for part, array in _runs(rows, values)
    ]
    return parts[0] if len(parts) == 1 else lax.concatenate(parts, 0)


def _runs(rows: Rows, values: Sequence[Value]) -> Iterator[tuple[Sequence[Value], jax.Array | None]]:
    """Yield stretches of values with the array of which they are the rows; None where they are of none."""
    start = 0
    while start < len(values):
        array, first = rows.get(values[start], (None, 0))
        stop, step = start + 1, 0
        while stop < len(values):
            other, at = rows.get(values[stop], (None, 0))
            if array is None and other is None:
                stop += 1
                continue
            step = step or at - first
            if array is None or other is not array or abs(step) != 1 or at != first + step * (stop - start):
                break
            stop += 1
        part = values[start:stop]
        if array is not None:
            low, high = sorted((first, first + step * (len(part) - 1)))
            found = lax.slice_in_dim(array, low, high + 1)
            yield part, lax.rev(found, (0,)) if step < 0 else found
        else:
            yield part, None
        start = stop


def run(
    node: Node,
    body: Function,
    rows: Rows,
    array_of: Callable[[Value], jax.Array],
    scalars: Mapping[str, jax.Array | None],
) -> dict[Value, jax.Array]:
    """Run the iterations of a loop.

    Args:
        node: what stands for them.
        body: its body as a function.
        rows: takes what is kept of each iteration.
        array_of: gives the arrays of the values that the loop needs.
        scalars: the arrays of numbers of the graph, by kind.

    Returns:
        What is carried out of the last iteration.
    """
    loop: Loop
    loop, given, constant, own = node.args
    carry = [_first(v, like, array_of) for v, like in zip(given, loop.body.inputs, strict=False)]
    constants = [array_of(v) for v in constant]
    each = [_side_by_side(rows, values, array_of) for values in own]
    integers = [np.array(values, np.int64) for values in loop.integers]
    numbers = [_elements(scalars[kind], places) for kind, places in loop.numbers.items()]

    def iteration(carry: list[jax.Array], of_iteration: Arg) -> tuple[list[jax.Array], list[jax.Array]]:
        own, integers, numbers = of_iteration
        results = body([*carry, *constants, *own, *integers], *numbers)
        results = tuple([lax.convert_element_type(x, x.dtype) for x in results])  # no weak types: they have to stay
        return [*results[: loop.carried]], [*results[loop.carried :]]

    last, kept = lax.scan(iteration, carry, (each, integers, numbers), length=loop.iterations)
    rows.update((value, (kept[which], iteration)) for value, (which, iteration) in loop.kept.items())
    return {value: last[which] for value, which in loop.last.items()}


def _first(value: Value | None, like: Value, array_of: Callable[[Value], jax.Array]) -> jax.Array:
    """Return what is carried into the first iteration; zeros where that reads nothing."""
    if value is None:
        return jnp.zeros(like.layout.size, to_numpy(like.layout.dtype))
    x = array_of(value)
    return lax.convert_element_type(x, x.dtype)


def _elements(array: jax.Array | None, places: np.ndarray) -> jax.Array | None:
    """Return the numbers [iterations, n] at ``places`` of an array; None where there are none."""
    return None if array is None or not places.size else array[places]
