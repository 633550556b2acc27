"""Why an executable for scalar inputs that are all equal does not fit a step."""

from __future__ import annotations

from collections.abc import Sequence

from lazytpu.diagnosis.cause import Cause
from lazytpu.ir.graph import Graph
from lazytpu.ir.tree import Number, operands
from lazytpu.passes.uniform_scalars import are_uniform


def unlike_numbers(graph: Graph, floats: Sequence[float], ints: Sequence[int]) -> Cause:
    """The cause where a graph made for numbers that are one is to be run with others."""
    kind, start, _ = next(run for run in graph.uniform if not are_uniform(floats, ints, (run,)))
    for node in graph.nodes:
        if any(type(x) is Number and (x.kind, x.index) == (kind, start) for x in operands(node)):
            whose = f"the numbers of {node.op.name}" if kind == "f" else f"the numbers that {node.op.name} adds"
            return Cause("promoted", f"{whose} were all the same and now they differ", node.site)
    raise AssertionError("a graph without the numbers it is uniform in")
