"""Writes of a slice whose new contents are computed from other elements of the array they are written to.

XLA on CPUs makes such a write where the array lies, in the loop that computes the new contents.  It looks for reads of
the array in that loop first, but does not see one behind a reshape: ``t[1:] = t[:-1].clone()`` may read rows that it
has just written (docs/explanation/xla-bugs.md).  Here these writes are found, and their contents are computed as a
whole first: `apart` passes them through a conditional, into which XLA fuses nothing, and whose predicate it cannot
know.  ``lax.optimization_barrier`` will not do: on CPUs it is gone before loops are fused.

A write that reads just the elements it overwrites (``x[i] += 1``) is right, and so is one that does not read the array
at all (a cache of keys and values): both stay as they are.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import reduce
from operator import or_

import jax
import jax.numpy as jnp
import torch
from jax import lax

from lazytpu.ir.graph import Graph
from lazytpu.ir.op_schema import Arg
from lazytpu.ir.tree import Node, Value, operands
from lazytpu.lowering.registry import target_platform

aten = torch.ops.aten
_READ_BY = {
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
    aten.as_strided_scatter.default: aten.as_strided.default,
}
_COPIES = {aten.clone.default, aten.detach.default, aten.alias.default, aten._to_copy.default}


def overlapping_writes(graph: Graph) -> frozenset[Node]:
    """Return the nodes that write to a slice of an array what other elements of it give; none but on CPUs."""
    if target_platform() != "cpu" or not any(node.op.recorded in _READ_BY for node in graph.nodes):
        return frozenset()
    sources = _Sources(graph)
    return frozenset([n for n in graph.nodes if n.op.recorded in _READ_BY and sources.overlap(n)])


@jax.jit
def apart(contents: jax.Array, target: jax.Array) -> jax.Array:
    """Return ``contents``, which XLA computes as a whole before it writes to ``target``."""
    if contents.size == 0:
        return contents
    # not constants, even where the contents are
    elements = lax.optimization_barrier([_middle(contents), _middle(target)])
    ready = reduce(lax.bitwise_or, [_bits(x) for x in elements], jnp.uint32(1)) != 0
    result: jax.Array = lax.cond(ready, lambda x: x, jnp.zeros_like, contents)
    return result


def _middle(x: jax.Array) -> jax.Array:
    middle = [n // 2 for n in x.shape]  # elements at the edges may be constants, of padding
    return lax.slice(x, middle, [n + 1 for n in middle]).reshape(())


def _bits(x: jax.Array) -> jax.Array:
    """Return some of the bits of an element, as u32."""
    x = lax.real(x) if jnp.iscomplexobj(x) else x
    x = x.astype(jnp.uint8) if x.dtype == jnp.bool_ else x
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{x.dtype.itemsize * 8}")).astype(jnp.uint32)


class _Sources:
    """What the values of a graph are computed from.

    Attributes:
        number: values to numbers; equal ones for equal computations, of which XLA makes one.
        read: for each number the set of those it is computed from, itself included, as bits.
        memory: for each number those among them in whose memory it may lie.
        written: for each number that of the array before slices were written to it.
        node: values to the nodes of this graph, in which equal ones may be merged: `Value.node` is of the path.
    """

    def __init__(self, graph: Graph) -> None:
        self.number: dict[Value, int] = {}
        self.read: list[int] = []
        self.memory: list[int] = []
        self.written: list[int] = []
        self.node = {value: node for node in graph.nodes for value in node.values if value is not None}
        known: dict[Hashable, int] = {}
        for value in graph.inputs:
            self._add(value, known.setdefault(value, len(known)), (), (), ())
        for node in graph.nodes:
            given = [x for x in operands(node) if type(x) is Value]
            key = node.op, self._key(node.args), self._key([*node.kwargs.items()])
            for value in node.results:
                written = given[:1] if node.op.recorded in _READ_BY else []
                shared = [x for x in written or given if x.layout.nbytes == value.layout.nbytes]
                self._add(value, known.setdefault((key, value.index), len(known)), given, shared, written)

    def _add(
        self, value: Value, number: int, given: Sequence[Value], shared: Sequence[Value], written: Sequence[Value]
    ) -> None:
        self.number[value] = number
        if number == len(self.read):
            self.written.append(self.written[self.number[written[0]]] if written else number)
            self.read.append(reduce(or_, [self.read[self.number[x]] for x in given], 1 << number))
            self.memory.append(reduce(or_, [self.memory[self.number[x]] for x in shared], 1 << number))

    def _key(self, x: Arg) -> Hashable:
        """Return arguments as a key, with numbers in place of values."""
        if type(x) is Value:
            return Value, self.number[x]
        return tuple([self._key(e) for e in x]) if isinstance(x, (list, tuple)) else (type(x), x)

    def _written(self, value: Value) -> int:
        return self.written[self.number[value]]

    def overlap(self, write: Node) -> bool:
        """Return whether the contents of a write need other elements of the array than those they overwrite."""
        target, contents = write.args[:2]
        return not self._in_place(contents, (write,), self.memory[self.number[target]])

    def _in_place(self, value: Value, writes: tuple[Node, ...], memory: int) -> bool:
        """Return whether each element of a value needs none of ``memory`` but the element it is written over.

        Args:
            value: the contents of the last of ``writes``, or the whole array where there are none.
            writes: to the array, to what the one before writes, and so on.
            memory: the numbers of the values that lie where the array does.
        """
        if not self.read[self.number[value]] & memory:
            return True
        node = self.node.get(value)
        if not writes or node is None:
            return not writes
        op, args = node.op.recorded, node.args
        last, outer = writes[-1], writes[:-1]
        if op is _READ_BY[last.op.recorded] and self._key(args[1:]) == self._key(last.args[2:]):
            same = self._written(args[0]) == self._written(last.args[0])
            return same and (not outer or self._in_place(args[0], outer, memory))
        if op in _READ_BY:
            return self._in_place(args[0], writes, memory) and self._in_place(args[1], (*writes, node), memory)
        if op in _COPIES or torch.Tag.pointwise in getattr(op, "tags", ()):
            given = [x for x in operands(node) if type(x) is Value]
            reading = [x for x in given if self.read[self.number[x]] & memory]
            return all(x.layout.size == value.layout.size and self._in_place(x, writes, memory) for x in reading)
        return False
