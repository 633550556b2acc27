"""Numbers that are all one: an executable for steps in which they are is compiled faster.

An optimizer gives an op on lists the bias corrections of all parameters, one number each, which differ only where
some parameters have made fewer steps; every batch norm adds 1 to its counter.  Read from one place, they leave equal
parts of a program equal, and XLA compiles equal parts once.  A step with other numbers gets an executable for any
numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from math import copysign

from lazytpu.ir.graph import Graph
from lazytpu.ir.tree import Number

_FEWEST = 4  # fewer are not worth a look in each step

Run = tuple[str, int, int]
"""Kind, start and stop of numbers that are one and the same."""


def are_uniform(floats: Sequence[float], ints: Sequence[int], runs: Iterable[Run]) -> bool:
    """Return whether the numbers of each run are one and the same; zeros of unlike sign are not."""
    for kind, start, stop in runs:
        part = (floats if kind == "f" else ints)[start:stop]
        x = part[0]
        if part.count(x) != stop - start or (x == 0 and kind == "f" and len({copysign(1.0, e) for e in part}) > 1):
            return False
    return True


def with_uniform(graph: Graph, floats: Sequence[float], ints: Sequence[int]) -> Graph:
    """Return the graph for steps in which numbers are all one wherever those of a list, or of counters, are now."""
    runs = [run for run in (*_lists(graph), *_counters(graph)) if run[2] - run[1] >= _FEWEST]
    uniform = tuple([run for run in runs if are_uniform(floats, ints, (run,))])
    if not uniform:
        return graph
    made = replace(graph, uniform=uniform)
    made.__dict__["key"] = graph.key  # it computes the same
    return made


def _lists(graph: Graph) -> Iterator[Run]:
    """Return the numbers of each op on lists."""
    for node in graph.nodes:
        for x in (*node.args, *node.kwargs.values()):
            if isinstance(x, list) and x and all(type(e) is Number and e.kind == "f" for e in x):
                yield "f", x[0].index, x[-1].index + 1


def _counters(graph: Graph) -> Iterator[Run]:
    """Return the numbers that are added to integers without dimensions, as far as no other number lies between them."""
    indices = [
        number.index
        for node in graph.nodes
        if node.op.name == "aten.add.Tensor" and not node.layout.size
        for number in node.args[1:2]
        if type(number) is Number and number.kind == "i"
    ]
    for _, run in groupby(enumerate(indices), lambda pair: pair[1] - pair[0]):
        found = [index for _, index in run]
        yield "i", found[0], found[-1] + 1
