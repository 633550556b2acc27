"""A graph without the scalars that are computed twice.

Optimizers that keep their step counters on the device have one for each parameter, all with the same number, and
compute the same bias corrections from each.  Where the counters are known to be one buffer, the graph needs one.
"""

from __future__ import annotations

from lazytpu.ir.graph import Graph
from lazytpu.ir.tree import Node, Number, Value
from lazytpu.passes.clone import cloned, replaced

_FOREACH = "aten._foreach_"


def merged(graph: Graph, same: dict[Value, Value]) -> tuple[Graph, tuple[int, ...]]:
    """Return a graph that computes the same from fewer inputs, each scalar once.

    Args:
        graph: not ``checked``: positions in its report are those of its nodes.
        same: inputs that hold what another input holds, which stays.

    Returns:
        The graph, and for each output of the old one its position among the outputs of the new one.
    """
    merge = _Merge(same)
    nodes = [kept for kept in map(merge.node, graph.nodes) if kept is not None]
    mapped = [merge.known.get(v, v) for v in graph.outputs]
    outputs = tuple(dict.fromkeys(mapped))
    inputs = tuple([v for v in graph.inputs if v not in same])
    places = {v: i for i, v in enumerate(inputs)}
    donated = tuple([places[graph.inputs[i]] for i in graph.donated if graph.inputs[i] in places])
    made = Graph(tuple(nodes), inputs, outputs, donated, graph.counts)
    positions = {value: i for i, value in enumerate(outputs)}
    return made, tuple([positions[v] for v in mapped])


class _Merge:
    """The walk over the nodes.

    Attributes:
        known: values to the equal ones that stay.
        computed: scalar ops and their arguments to the node that stays.
    """

    def __init__(self, same: dict[Value, Value]) -> None:
        self.known = dict(same)
        self.computed: dict[object, Node] = {}

    def node(self, node: Node) -> Node | None:
        """Return what stands for a node in the new graph; None where an earlier node computes the same."""
        args = tuple([replaced(x, self.equal) for x in node.args])
        kwargs = {k: replaced(x, self.equal) for k, x in node.kwargs.items()}
        made = node if args == node.args and kwargs == node.kwargs else cloned(node, args, kwargs, results=True)
        if node.op.random or any(v is None or v.layout.size for v in node.values):
            return made
        key = node.op, _key(args), _key(tuple(kwargs.items())), tuple([v.layout for v in node.values if v])
        twin = self.computed.get(key)
        if twin is not None:
            self.known.update((v, w) for v, w in zip(node.values, twin.values, strict=True) if v and w)
            return None
        self.computed[key] = node
        return self.shorter(made) if _is_each(made) else made

    def equal(self, x: Value | Number) -> Value | Number:
        """Return the operand that stays in the place of one."""
        return self.known.get(x, x) if isinstance(x, Value) else x

    def shorter(self, node: Node) -> Node:
        """Return a foreach op with each different element once."""
        n = len(node.values)
        lists = [x for x in (*node.args, *node.kwargs.values()) if isinstance(x, list)]
        elements = [_key(tuple([x[i] for x in lists])) for i in range(n)]
        first = {element: i for i, element in reversed(list(enumerate(elements)))}
        kept = sorted(first.values())
        if len(kept) == n:
            return node
        for i, element in enumerate(elements):
            if i != first[element]:
                value, twin = node.values[i], node.values[first[element]]
                assert value is not None and twin is not None  # a list has no undefined results
                self.known[value] = twin

        def chosen(x: object) -> object:
            return [x[i] for i in kept] if isinstance(x, list) else x

        args = tuple([chosen(x) for x in node.args])
        kwargs = {k: chosen(x) for k, x in node.kwargs.items()}
        made = cloned(node, args, kwargs, results=True)
        made.values, made.structure = tuple([node.values[i] for i in kept]), list(range(len(kept)))
        if node.natural is not None:
            made.natural = tuple([node.natural[i] for i in kept])
        return made


def _is_each(node: Node) -> bool:
    """Return whether a node is a foreach op whose lists all have one element for each result."""
    n = len(node.values)
    if not node.op.name.startswith(_FOREACH) or node.structure != list(range(n)) or n < 2:
        return False
    arguments = (*node.args, *node.kwargs.values())
    return all(len(x) == n for x in arguments if isinstance(x, list)) and not any(
        isinstance(x, tuple) for x in arguments
    )


def _key(x: object) -> object:
    """Something hashable that is equal for arguments that mean the same."""
    if isinstance(x, (list, tuple)):
        return tuple([_key(e) for e in x])
    if type(x) is Number:
        return Number, x.kind, x.index, x.dtype
    if isinstance(x, (float, complex)):
        return type(x), repr(x)
    try:
        hash(x)
    except TypeError:
        return id(x)
    return type(x), x
