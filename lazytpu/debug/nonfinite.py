"""`find_nan`: find the first op that makes a NaN or an infinity."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from lazytpu.debug.values import PendingGraph, describe, observed_now, observing, results_of
from lazytpu.ir.graph import Graph
from lazytpu.ir.op_schema import Op, aten, op_of
from lazytpu.ir.site import Site
from lazytpu.ir.tree import Node, Value, operands
from lazytpu.tensors.layout import root_layout
from lazytpu.tracing import cutting, input_origins

_CHECKED = {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}


@dataclass(frozen=True, slots=True)
class NonFinite:
    """Where the first NaN or infinity came from.

    Attributes:
        op: the aten op that made it; empty where an input of the graph already had it.
        site: the line and module of the op, or of the first op that reads the input.
        operands: type and range of each tensor operand; scalar inputs by their values.
        result: type and range of the result, or of the input.
        tensor: the name of the input, such as ``parameter `net.0.weight```.
        graph: number of the graph, from 1 since `find_nan` began.
    """

    op: str
    site: Site
    operands: tuple[str, ...]
    result: str
    tensor: str = ""
    graph: int = 1

    def __str__(self) -> str:
        source = f"the input {self.tensor}".rstrip() + ("," if ", " in self.tensor else "")
        what = f"{self.op} returned" if self.op else f"{source} is"
        lines = [f"{what} {self.result}", f"  at    {self.site.describe()}"]
        lines += [f"  with  {text}" for text in self.operands]
        return "\n".join(lines)

    __repr__ = __str__


class _Search:
    """Searches each graph until something is found."""

    def __init__(self, inf: bool) -> None:
        self.inf = inf
        self.graphs = 0
        self.found: NonFinite | None = None

    def look(self, pending: PendingGraph) -> None:
        if self.found is not None:
            return
        self.graphs += 1
        graph = pending.graph(pending.outputs)
        every = [*graph.inputs, *[v for node in graph.nodes for v in results_of(node)]]
        values = [v for v in every if v.layout.dtype in _CHECKED and v not in graph.parts]
        flags = pending.run(_with_flags(graph, values, self.inf))
        bad = {v for v, flag in zip(values, flags, strict=True) if bool(flag) is not self.inf}
        for node in graph.nodes:
            read = [x for x in operands(node) if type(x) is Value and x not in graph.parts]
            inputs = [v for v in read if v in bad and v.node is None]
            if inputs:
                self.found = self._input(inputs[0], node, pending)
                return
            if bad.intersection(results_of(node)) and not bad.intersection(read):
                self.found = self._op(node, read, pending)
                return

    def _input(self, value: Value, node: Node, pending: PendingGraph) -> NonFinite:
        text = describe(value.layout, pending.contents([value])[value])
        tensor = input_origins.name_of(value)
        return NonFinite("", node.site, (), text, tensor, self.graphs)

    def _op(self, node: Node, read: list[Value], pending: PendingGraph) -> NonFinite:
        results = results_of(node)
        contents = pending.contents([*read, *results])
        texts = [
            describe(x.layout, contents[x]) if isinstance(x, Value) else f"the scalar {pending.scalar(x)}"
            for x in operands(node)
            if (x in contents if isinstance(x, Value) else x.dtype != "rng")
        ]
        made = ", ".join(describe(v.layout, contents[v]) for v in results)
        return NonFinite(node.op.name, node.site, tuple(texts), made, graph=self.graphs)


def _with_flags(graph: Graph, values: list[Value], inf: bool) -> Graph:
    """Return the graph with one bool for each value as outputs: whether all is finite (``inf``), or any NaN."""
    test, fold = (aten.isfinite.default, aten.all.default) if inf else (aten.isnan.default, aten.any.default)
    added: list[Node] = []
    for value in values:
        size = value.layout.size
        stride = torch.empty(size, device="meta").stride()
        each = _node(op_of(test), value, size, stride)
        added += [each, _node(op_of(fold), each.value, (), ())]
    return replace(graph, nodes=(*graph.nodes, *added), outputs=tuple(n.value for n in added[1::2]), donated=())


def _node(op: Op, value: Value, size: tuple[int, ...], stride: tuple[int, ...]) -> Node:
    node = Node(None)
    node.op, node.args = op, (value,)
    node.set_results((root_layout(size, stride, torch.bool),), 0)
    return node


def find_nan(
    function: Callable[..., object] | None = None, *args: object, inf: bool = True, **kwargs: object
) -> NonFinite | None:
    """Find the first op that makes a NaN or an infinity of operands that have none.

    Each graph that the function records runs an extra time, with a flag for each of its values.  The function runs to
    its end as usual.

    Args:
        function: a function; if it is compiled by `lazytpu.compile` or ``torch.compile``, it is recorded this time.
            Without one, the pending graph is searched and run.
        args, kwargs: for the function.
        inf: whether infinities count.  Attention masks have ``-inf`` on purpose; False looks for NaN only.

    Returns:
        The first op found, None if there is none.  An error that the function raises is raised here too, unless
        something was found before it.

    Example:
        >>> lazytpu.debug.find_nan(train_step, x, y)  # doctest: +SKIP
        aten.log returned f32[64] with 1 inf, the rest from -3.1 to 0.2
          at    train.py:31  Net
          with  f32[64] from 0 to 1.2
    """
    search = _Search(inf)
    try:
        if function is None:
            with observed_now(search.look):
                cutting.cut("find_nan")
        else:
            with observing(search.look, "find_nan"):
                held = function(*args, **kwargs)  # until the cut, or its ops would be pruned
            del held
    except Exception:
        if search.found is None:
            raise
    return search.found
