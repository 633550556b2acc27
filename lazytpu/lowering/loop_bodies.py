"""The body of a loop, made from the nodes of all its iterations; `loops` finds these.

Iterations may differ in

* operands: what the iteration before has made (or the one before that) is carried; what no iteration makes is either
  one for all, or each has its own,
* numbers from Python, and the integers by which slices are taken (``x[:, t]``).

What each iteration has its own of is laid side by side.  Where that is what the iterations of an earlier loop have
made, as for gradients, the array is there already (loop_rows.py); where it would be the weights of the layers of a deep
model, the copies could cost more than the loop saves, and there is none.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import torch

from lazytpu.ir.graph import Graph
from lazytpu.ir.op_schema import Arg, Op
from lazytpu.ir.tree import Node, Number, Value, operands
from lazytpu.ir.types import TensorType
from lazytpu.lowering.registry import dynamic_arguments
from lazytpu.passes.clone import cloned

_MOST_INPUTS_COPIED = 1 / 32  # of the bytes that the iterations make, for inputs laid side by side
_MOST_UNNEEDED = 1 << 26  # bytes
_INDEX = TensorType((), (), torch.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Loop:
    """What a node runs that stands for equal iterations.  Its arguments are lists of values.

    Attributes:
        body: one iteration.  Its inputs are what is carried, what is the same for all iterations, what each has its own
            of, and the integers that vary; its outputs what is carried on, and what is kept of each iteration.
        iterations: how many.
        integers: for each integer that varies, its value in each iteration.
        numbers: by kind, the places [iterations, n] in the array of the graph of the n numbers that the body takes.
        carried: how many values are carried from one iteration to the next.
        last: results of the node that the last iteration carries out; maps each to its position among the carried.
        kept: the other results; maps each to the array of rows that holds it, and to its iteration.
        positions: of the body's nodes in the graph, as the first iteration has them.
    """

    body: Graph
    iterations: int
    integers: tuple[tuple[int, ...], ...]
    numbers: dict[str, np.ndarray]
    carried: int
    last: dict[Value, int]
    kept: dict[Value, tuple[int, int]]
    positions: tuple[int, ...]


_NAME = "lazytpu.loop"
LOOP = Op(cast(torch._ops.OpOverload, _NAME), cast(torch._ops.OpOverload, _NAME), _NAME, (), None, False)


class NotALoopError(Exception):
    """Iterations take their operands from elsewhere than the iteration before did."""


class CopiesError(Exception):
    """The loop would have to copy or keep much more than its iterations need."""


def loop_of(
    inside: Sequence[Node], period: int, iterations: int, needed: set[Value], positions: dict[Node, int]
) -> Node:
    """Return the node that stands for nodes that repeat themselves.

    Args:
        inside: the nodes of all iterations.
        period: how many an iteration has.
        iterations: how many there are.
        needed: values that something outside reads.
        positions: of nodes in the graph.

    Raises:
        NotALoopError, CopiesError: there is no such node.
    """
    return _Builder(inside, period, iterations).node(needed, positions)


@dataclass(slots=True)
class _Carried:
    """A result of an earlier iteration, as the body reads it.

    Attributes:
        given: what the first iterations read instead, one value an iteration.
        inputs: of the body: the result of the iteration before, of the one before that, and so on.
    """

    result: Value
    given: tuple[Value | None, ...]
    inputs: list[Value]


@dataclass(slots=True)
class _Builder:
    """Makes the body of a loop from the nodes of all iterations."""

    inside: Sequence[Node]
    period: int
    iterations: int
    made: dict[Value, tuple[int, int, int]] = field(default_factory=dict)  # iteration, place in it, index of the result
    local: dict[tuple[int, int], Value] = field(default_factory=dict)  # (place, index): the body's
    carried: dict[Hashable, _Carried] = field(default_factory=dict)
    constant: dict[Value, Value] = field(default_factory=dict)
    own: dict[tuple[Value, ...], Value] = field(default_factory=dict)
    integers: dict[tuple[int, ...], Value] = field(default_factory=dict)
    numbers: dict[str, dict[tuple[int, ...], int]] = field(default_factory=lambda: {kind: {} for kind in "fic"})

    def node(self, needed: set[Value], positions: dict[Node, int]) -> Node:
        """Return the node that stands for the iterations."""
        for i, node in enumerate(self.inside):
            for index, value in enumerate(node.values):
                if value is not None:
                    self.made[value] = (i // self.period, i % self.period, index)
        body = [self._cloned(place) for place in range(self.period)]
        self._refuse_copies()
        last: dict[Value, tuple[int, int]] = {}
        kept: dict[tuple[int, int], dict[int, Value]] = {}
        unneeded = 0  # bytes of rows that are kept beside those that something needs
        for (place, index), result in self.local.items():
            iterations = {
                t: v for t in range(self.iterations) if (v := self._at(t, place).values[index]) in needed and v
            }
            if [*iterations] == [self.iterations - 1]:
                last[iterations[self.iterations - 1]] = (place, index)
            elif iterations:
                kept[place, index] = iterations
                unneeded += result.layout.nbytes * (self.iterations - len(iterations))
        if unneeded > _MOST_UNNEEDED:
            raise CopiesError
        chains = self._chains(last)
        carried = [
            (value, given) for chain in chains for value, given in zip(chain.inputs, chain.given[::-1], strict=True)
        ]
        following = [v for chain in chains for v in (self._result(chain), *chain.inputs[:-1])]
        ends = {self._key(chain): sum(len(c.inputs) for c in chains[:i]) for i, chain in enumerate(chains)}
        inputs = [v for v, _ in carried] + [*self.constant.values(), *self.own.values(), *self.integers.values()]
        tables = {k: np.array([*table], np.int32).reshape(-1, self.iterations).T for k, table in self.numbers.items()}
        nf, ni, nc = (table.shape[1] for table in tables.values())
        rows = [*kept]
        loop = Loop(
            Graph(tuple(body), tuple(inputs), (*following, *[self.local[at] for at in rows]), (), (nf, ni, nc)),
            self.iterations,
            tuple(self.integers),
            tables,
            len(carried),
            {value: ends[at] for value, at in last.items()},
            {
                value: (rows.index(at), iteration)
                for at, iterations in kept.items()
                for iteration, value in iterations.items()
            },
            tuple([positions[node] for node in self.inside[: self.period]]),
        )
        return _node(loop, [given for _, given in carried], [*self.constant], [*map(list, self.own)], self.inside[0])

    def _at(self, iteration: int, place: int) -> Node:
        return self.inside[iteration * self.period + place]

    def _cloned(self, place: int) -> Node:
        """Return the node of the body for one place of the iterations."""
        iterations = [self._at(iteration, place) for iteration in range(self.iterations)]
        node = iterations[0]
        found = iter([self._operand(xs) for xs in zip(*map(operands, iterations), strict=True)])
        args = [_filled(x, found) for x in node.args]
        kwargs = {name: _filled(x, found) for name, x in node.kwargs.items()}
        varying = {*dynamic_arguments(node.op.recorded)}
        for i, x in enumerate(node.args):
            if type(x) is int and node.op.arguments[i].name in varying:
                args[i] = self._integer([iteration.args[i] for iteration in iterations])
        for name, x in node.kwargs.items():
            if type(x) is int and name in varying:
                kwargs[name] = self._integer([iteration.kwargs[name] for iteration in iterations])
        made = cloned(node, tuple(args), kwargs, results=False)
        self.local.update(((place, i), value) for i, value in enumerate(made.values) if value is not None)
        return made

    def _integer(self, values: Sequence[int]) -> int | Value:
        if len({*values}) == 1:
            return values[0]
        return self.integers.setdefault(tuple(values), Value(None, 0, _INDEX))

    def _operand(self, xs: Sequence[Value | Number]) -> Value | Number:
        """Return what the body has for an operand, of which each iteration has its own."""
        if type(xs[0]) is Number:
            return self._number(cast(Sequence[Number], xs))
        values = cast("tuple[Value, ...]", tuple(xs))
        if not any(x in self.made for x in values):
            if len({*values}) == 1:
                return self.constant.setdefault(values[0], _input(values[0]))
            return self.own.setdefault(values, _input(values[0]))
        if values[-1] not in self.made:
            raise NotALoopError
        iteration, at, index = self.made[values[-1]]
        before = self.iterations - 1 - iteration
        expected = [self._at(t - before, at).values[index] for t in range(before, self.iterations)]
        if [*values[before:]] != expected or any(x in self.made for x in values[:before]):
            raise NotALoopError
        if not before:
            return self.local[at, index]
        result = self._at(0, at).values[index]
        assert result is not None
        key = at, index, values[:before]
        chain = self.carried.get(key)
        if chain is None:
            chain = self.carried[key] = _Carried(result, values[:before], [_input(result) for _ in range(before)])
        return chain.inputs[-1]

    def _number(self, xs: Sequence[Number]) -> Number:
        first, kind = xs[0], xs[0].kind
        table = self.numbers[kind]
        places = [tuple([x.index + i for x in xs]) for i in range(2 if first.dtype == "rng" else 1)]
        known = table.get(places[0])
        if known is None or (len(places) == 2 and table.get(places[1]) != known + 1):
            known = len(table)
            table.update((at, known + i) for i, at in enumerate(places))
            if len(table) != known + len(places):
                raise NotALoopError
        return Number(kind, known, first.dtype)

    def _refuse_copies(self) -> None:
        """Raise where inputs of the graph that would be laid side by side are large beside what the iterations make."""
        copied = sum(v.layout.nbytes for values in self.own for v in {*values} if v.node is None)
        if copied > _MOST_INPUTS_COPIED * sum(v.layout.nbytes for v in self.made):
            raise CopiesError

    def _key(self, chain: _Carried) -> tuple[int, int]:
        _, place, index = self.made[chain.result]
        return place, index

    def _result(self, chain: _Carried) -> Value:
        return self.local[self._key(chain)]

    def _chains(self, last: dict[Value, tuple[int, int]]) -> list[_Carried]:
        """Return what is carried: what later iterations read, and what something outside needs of the last one."""
        chains = [*self.carried.values()]
        there = {self._key(chain) for chain in chains}
        for place, index in last.values():
            if (place, index) not in there:
                result = self._at(0, place).values[index]
                assert result is not None
                chains.append(_Carried(result, (None,), [_input(result)]))
        return chains


def _input(like: Value) -> Value:
    return Value(None, 0, like.layout)


def _filled(x: Arg, found: Iterator[Value | Number]) -> Arg:
    """Return an argument with the next of ``found`` in place of each operand, in the order of `operands`."""
    if type(x) is Value or type(x) is Number:
        return next(found)
    if isinstance(x, (list, tuple)):
        return type(x)([_filled(e, found) for e in x])
    return x


def _node(loop: Loop, given: list[Value | None], constant: list[Value], own: list[list[Value]], first: Node) -> Node:
    node = Node(None)
    node.op, node.site, node.args = LOOP, first.site, (loop, given, constant, own)
    node.values = (*loop.last, *loop.kept)
    return node
