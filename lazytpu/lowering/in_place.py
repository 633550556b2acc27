"""Updates that XLA can make where a donated input lies, without a copy of it.

A weight is read by the forward and by the backward pass, then overwritten by the optimizer.  The backward pass of a
layer needs the weight for the gradient of its input, on which the new weight does not depend; so XLA, which looks at
dependencies alone, may run the two in any order, and copies the weight first to be safe: each weight, in each step
(24 MB for the GPT of the benchmarks, a twelfth of its step).

Here such an update is made to depend on the reads before it: ``new`` becomes ``select(p, new, 0)``, where ``p`` is a
predicate on the bits of one element of what was computed from the old weight.  It is true for any bits, which XLA does
not find out before it has assigned buffers, and LLVM does after, when it drops the choice.
``lax.optimization_barrier`` will not do: on the CPU it is gone before XLA decides on copies.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import reduce
from operator import or_
from typing import cast

import jax
import jax.numpy as jnp
import torch
from jax import lax

from lazytpu.ir.graph import Graph
from lazytpu.ir.op_schema import Arg
from lazytpu.ir.tree import Node, Value, operands
from lazytpu.lowering.registry import Args

_LARGE = 4096  # bytes from which a copy costs more than to start it
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "linear", "linear_backward", "matmul", "matmul_backward"}
_BY_ELEMENT = ("_foreach_", "_fused_")
# Ops that give the gradients of input and weight, and perhaps bias: input, incoming gradient and weight among their
# arguments.
_BACKWARD: dict[str, Callable[[Args], Sequence[Value]]] = {
    "linear_backward": lambda args: args[:3],
    "matmul_backward": lambda args: (args[1], args[0], args[2]),
    "convolution_backward": lambda args: (args[1], args[0], args[2]),
}


def reads_before(graph: Graph) -> dict[Value, list[Value]]:
    """Return for each output that takes over a donated input what to wait for, so that the input is read no more.

    The reads that matter are those on whose results the output does not depend anyway.  Waited for is not such a
    result but the first output that depends on it, the gradient of a layer below: an output lies in memory, while a
    result that XLA computes as part of something larger would be taken out of there.  Without one, results of matrix
    products serve, which lie in memory too.
    """
    pairs = _pairs(graph)
    if not pairs:
        return {}
    readers = _readers(graph, set(pairs.values()))
    candidates = list(dict.fromkeys(v for values in readers.values() for v in values))
    numbers = {v: i for i, v in enumerate(candidates)}
    outputs = set(graph.outputs)
    before: dict[Value, int] = {}  # values to a set of bits, one for each of `numbers` they depend on
    known: dict[Value, Value] = {}  # of `numbers` those that have been read, to what lies in memory and depends on them
    unknown = 0  # the bits of the others
    found: dict[Value, list[Value]] = {}
    for node in graph.nodes:
        results = [(v, reduce(or_, (before.get(s, 0) for s in sources), 0)) for v, sources in _dependencies(node)]
        if _updates(node):
            for value, bits in results:
                given = readers[pairs[value]] if value in pairs else ()
                reads = [v for v in given if v in before and not bits >> numbers[v] & 1]
                if reads and all(v in known for v in reads):
                    found[value] = list(dict.fromkeys(known[v] for v in reads))
        for value, bits in results:
            if value in numbers:
                bits |= 1 << numbers[value]
                unknown |= 1 << numbers[value]
                if getattr(node.op.recorded, "_opname", "") in _PRODUCTS and _has_bits(value):
                    known[value] = value
            before[value] = bits
            if value in outputs and bits & unknown and _has_bits(value):
                for i in _set_bits(bits & unknown):
                    known[candidates[i]] = value
                unknown &= ~bits
    return found


def _set_bits(bits: int) -> Iterator[int]:
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


@jax.jit
def after(values: Sequence[jax.Array], new: jax.Array) -> jax.Array:
    """Return ``new``, which XLA will not compute before ``values``; traced once for equal types."""
    ready = reduce(lax.bitwise_and, [_always_true(v) for v in values])
    return lax.select(jnp.broadcast_to(ready, new.shape), new, jnp.zeros_like(new))


def _always_true(x: jax.Array) -> jax.Array:
    middle = [n // 2 for n in x.shape]  # elements at the edges may be constants, of padding
    element = lax.slice(x, middle, [n + 1 for n in middle]).reshape(())
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        element = lax.real(element)
    elif x.dtype == jnp.bool_:
        element = element.astype(jnp.uint8)
    unsigned = jnp.dtype(f"uint{element.dtype.itemsize * 8}")
    bits = lax.bitcast_convert_type(element, unsigned)
    return lax.ne(lax.bitwise_or(bits, unsigned.type(1)), unsigned.type(0))


def _pairs(graph: Graph) -> dict[Value, Value]:
    """Map outputs to the donated inputs whose memory they get: jax gives it to those of one type in order."""
    free: dict[Hashable, list[Value]] = {}
    for i in graph.donated:
        value = graph.inputs[i]
        free.setdefault(_type(value), []).append(value)
    single = graph.outputs[: len(graph.outputs) - graph.concatenated]
    pairs = {v: waiting.pop(0) for v in single if (waiting := free.get(_type(v)))}
    return {v: given for v, given in pairs.items() if v.layout.nbytes >= _LARGE}


def _type(value: Value) -> Hashable:
    return value.layout.size, value.layout.dtype


def _readers(graph: Graph, inputs: set[Value]) -> dict[Value, list[Value]]:
    """Return the results of the ops that read each of the inputs."""
    readers: dict[Value, list[Value]] = {v: [] for v in inputs}
    for node in graph.nodes:
        for value, sources in _dependencies(node):
            for source in {*sources} & inputs:
                readers[source].append(value)
    return readers


def _dependencies(node: Node) -> Iterator[tuple[Value, list[Value]]]:
    """Yield each result of an op with the operands it is computed from."""
    if getattr(node.op.recorded, "_opname", "") in _BACKWARD:
        x, grad, weight = _BACKWARD[node.op.recorded._opname](node.args)
        sources = ([grad, weight], [grad, x], [grad])
        yield from ((value, found) for value, found in zip(node.values, sources, strict=False) if value is not None)
    elif not _is_by_element(node):
        every = [x for x in operands(node) if type(x) is Value]
        yield from ((value, every) for value in node.values if value is not None)
    else:
        arguments = [*node.args, *node.kwargs.values()]
        lists = node.structure if isinstance(node.structure, tuple) else (node.structure,)
        for group in cast("tuple[list[int], ...]", lists):
            for n, value in enumerate(node.values[i] for i in group):
                if value is not None:
                    yield value, [x for a in arguments if type(x := _element(a, n, len(group))) is Value]


def _element(argument: Arg, n: int, length: int) -> Arg:
    return argument[n] if isinstance(argument, (list, tuple)) and len(argument) == length else argument


def _has_bits(value: Value) -> bool:
    """Return whether an element's bits can be looked at."""
    return not value.layout.dtype.is_complex and value.layout.dtype is not torch.bool and 0 not in value.layout.size


def _updates(node: Node) -> bool:
    """Return whether an op computes each element of a result of the same elements of its operands, and so in place."""
    return _is_by_element(node) or torch.Tag.pointwise in getattr(node.op.recorded, "tags", ())


def _is_by_element(node: Node) -> bool:
    """Return whether the n-th result depends on the n-th elements of lists only."""
    return isinstance(node.op.recorded, torch._ops.OpOverload) and node.op.recorded._opname.startswith(_BY_ELEMENT)
