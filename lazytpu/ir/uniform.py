"""Lists of numbers that are all one: an executable for steps in which they are is compiled faster.

An optimizer gives an op on lists the bias corrections of all parameters, one number each, which differ only where
some parameters have made fewer steps.  Read from one place, they leave the parts of a program that treat parameters
of one shape equal, and XLA compiles equal parts once.  A step with other numbers gets an executable for any numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import copysign

from lazytpu.ir.cause import Cause
from lazytpu.ir.graph import Graph
from lazytpu.ir.tree import Number, operands

_FEWEST = 4  # shorter lists are not worth a look in each step


def are_uniform(floats: Sequence[float], ranges: Iterable[tuple[int, int]]) -> bool:
    """Whether the numbers in each range are one and the same; zeros of unlike sign are not."""
    for start, stop in ranges:
        x, part = floats[start], floats[start:stop]
        if part.count(x) != stop - start or (x == 0 and len({copysign(1.0, e) for e in part}) > 1):
            return False
    return True


def with_uniform(graph: Graph, floats: Sequence[float]) -> Graph:
    """The same graph for steps in which the numbers of a list are all one wherever they are in ``floats``."""
    lists = [x for node in graph.nodes for x in (*node.args, *node.kwargs.values()) if isinstance(x, list)]
    ranges = [
        (x[0].index, x[-1].index + 1)
        for x in lists
        if len(x) >= _FEWEST and all(type(e) is Number and e.kind == "f" for e in x)
    ]
    uniform = tuple([r for r in ranges if are_uniform(floats, (r,))])
    if not uniform:
        return graph
    made = replace(graph, uniform=uniform)
    made.__dict__["key"] = graph.key  # it computes the same
    return made


def unlike_numbers(graph: Graph, floats: Sequence[float]) -> Cause:
    """The cause where a graph made for equal numbers in a list is to be run with others."""
    start = next(uniform[0] for uniform in graph.uniform if not are_uniform(floats, (uniform,)))
    for node in graph.nodes:
        if any(type(x) is Number and (x.kind, x.index) == ("f", start) for x in operands(node)):
            return Cause("promoted", f"the numbers of {node.op.name} were all the same and now they differ", node.site)
    raise AssertionError("a graph without the numbers it is uniform in")
