"""From an FX graph of aten ops, as torch.compile and make_fx give it, to a graph of the IR.

Nothing is lowered here: the nodes refer to the same ops as recorded ones do, and go through the same rules.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from itertools import count
from math import prod
from typing import Any

import torch

from lazytpu.errors import UnsupportedOpError
from lazytpu.frontends.fx.higher_order import TABLE, HigherOrder, result_layouts
from lazytpu.frontends.fx.site import site_of
from lazytpu.ir.graph import graph_of
from lazytpu.ir.op_schema import NO_COMPUTATION, Op, OpOverload, aten, op_of
from lazytpu.ir.subgraph import Subgraph, interned
from lazytpu.ir.tree import Node, Number, Value
from lazytpu.ir.types import TensorType
from lazytpu.location.site import UNKNOWN
from lazytpu.lowering.lower import can_lower
from lazytpu.tensors.layout import Layout, root_layout
from lazytpu.tracing.infer import infer, result_layout
from lazytpu.tracing.record import VIEW_OPS

_SAME = {aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.lift.default}
_COPY = aten.copy_.default
_NUMBER = {bool: torch.bool, int: torch.int64, float: torch.float64}
_FULL = op_of(aten.full.default)
# Arithmetic on a number that was read from a tensor, as a loop's body may do it: the number stays a tensor.
_ARITHMETIC = {
    operator.add: aten.add.Tensor,
    operator.sub: aten.sub.Tensor,
    operator.mul: aten.mul.Tensor,
    operator.neg: aten.neg.default,
    operator.lt: aten.lt.Tensor,
    operator.le: aten.le.Tensor,
    operator.gt: aten.gt.Tensor,
    operator.ge: aten.ge.Tensor,
    operator.eq: aten.eq.Tensor,
    operator.ne: aten.ne.Tensor,
}
_READ = aten._local_scalar_dense.default
_CHOICE = torch.sym_ite


def unsupported_ops(module: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    """What a graph holds that neither a rule nor a decomposition lowers."""
    for node in module.graph.nodes:
        if node.op == "call_function" and not _is_known(node.target):
            yield node
        elif node.op in ("call_module", "call_method"):
            yield node
        elif node.op == "get_attr":
            found = attribute(module, node.target)
            if isinstance(found, torch.fx.GraphModule):
                yield from unsupported_ops(found)


def _is_known(target: Any) -> bool:
    if target in (operator.getitem, _COPY, _READ, _CHOICE) or target in _ARITHMETIC:
        return True
    if target in TABLE or target in _SAME or target in NO_COMPUTATION:
        return True
    return isinstance(target, OpOverload) and not target._schema.is_mutable and can_lower(target)


def attribute(module: Any, path: str) -> Any:
    """What a ``get_attr`` node refers to."""
    for name in str(path).split("."):
        module = getattr(module, name)
    return module


def subgraph_of(module: torch.fx.GraphModule) -> Subgraph:
    """The body that an FX graph computes.

    Raises:
        UnsupportedOpError: it writes to an argument, or holds a large tensor.
    """
    layouts = [_layout(n.meta["val"]) for n in module.graph.nodes if n.op == "placeholder"]
    body = Conversion(module, layouts, inner=True)
    if body.written:
        raise UnsupportedOpError(
            "a branch or the body of a loop writes to its argument", fix="return the new value instead"
        )
    constants = tuple((i, r) for i, r in enumerate(body.results) if type(r) is not Value)
    graph = graph_of(body.last, tuple([r for r in body.results if type(r) is Value]))
    return interned(graph, tuple([v.index for v in graph.inputs]), constants)


class Conversion:
    """One FX graph of functional aten ops, converted.

    It may copy to its arguments at its end.

    Attributes:
        last: the last node; `graph_of` prunes the path to it.
        results: what the graph returns: a `Value`, or anything else as it is.
        arguments: the values that stand for whole arguments, to their positions.
        written: positions of arguments to the values that are copied into them.
        known: what each FX node stands for.
        captured: the tensors the graph holds; they are inputs after the arguments.
    """

    def __init__(self, module: torch.fx.GraphModule, layouts: Sequence[Layout | None], inner: bool = False) -> None:
        """Converts.

        Args:
            module: the nodes carry their types in ``meta["val"]``, of fixed sizes.
            layouts: how the arguments lie in their storages, None for those that are no tensors.
            inner: it is the body of a loop or a branch.
        """
        self.module, self.inner = module, inner
        self.last = Node(None)
        self.results: list[Any] = []
        self.arguments: dict[Value, int] = {}
        self.written: dict[int, Value] = {}
        self.captured: list[torch.Tensor] = []
        self._layouts = layouts
        self.known: dict[torch.fx.Node, Any] = {}
        self._site = UNKNOWN
        positions = count()
        for node in module.graph.nodes:
            self._site = site_of(node)
            if node.op == "placeholder":
                self.known[node] = self._argument(next(positions), node)
            elif node.op == "get_attr":
                self.known[node] = self._attribute(node)
            elif node.op == "output":
                outputs = node.args[0] if isinstance(node.args[0], (list, tuple)) else [node.args[0]]
                self.results = [self.known[x] if isinstance(x, torch.fx.Node) else x for x in outputs]
            else:
                self.known[node] = self._call(node)

    def _argument(self, position: int, node: torch.fx.Node) -> Any:
        layout = self._layouts[position]
        if layout is None:
            return node.meta.get("val")
        value = self._read(Value(None, position, layout.root), layout)
        self.arguments[value] = position
        return value

    def _read(self, root: Value, layout: Layout) -> Value:
        """The value that lies at ``layout`` in a storage that holds ``root``: the chain of view ops."""
        if layout.parent is None:
            return root
        op = VIEW_OPS[layout.op] if isinstance(layout.op, str) else layout.op
        node = self._node(op, (self._read(root, layout.parent), *layout.args), {})
        if layout.index is None:
            node.set_results((layout,), 0)
        else:
            results, structure, _ = infer(op, node)
            node.set_results(results, structure)
        value = node.values[layout.index or 0]
        assert value is not None
        return value

    def _attribute(self, node: torch.fx.Node) -> Any:
        found = attribute(self.module, str(node.target))
        if isinstance(found, torch.fx.GraphModule):
            return subgraph_of(found)
        if not isinstance(found, torch.Tensor):
            return found
        if not self.inner:
            self.captured.append(found)
            return Value(None, len(self._layouts) + len(self.captured) - 1, _layout(found))  # type: ignore[arg-type]
        if found.numel() != 1:
            raise UnsupportedOpError(
                f"a branch or the body of a loop holds a tensor of {tuple(found.shape)}",
                at=self._site.describe(),
                fix="give it as an operand",
            )
        return self._full(found)

    def _full(self, tensor: torch.Tensor) -> Value:
        made = self._node(_FULL, (list(tensor.shape), tensor.item()), {"dtype": tensor.dtype})
        made.set_results((_layout(tensor),), 0)
        return made.value

    def _scalar(self, x: Any) -> Value:
        return x if type(x) is Value else self._full(torch.tensor(x, dtype=_NUMBER[type(x)]))

    def _call(self, node: torch.fx.Node) -> Any:
        given: Any = torch.fx.node.map_arg((node.args, node.kwargs), lambda n: self.known[n])
        args, kwargs = given
        target: Any = node.target
        if target is operator.getitem:
            return args[0][args[1]]
        if target in _SAME or target is _READ:
            return args[0]
        if target in _ARITHMETIC:
            return self._arithmetic(target, args)
        if target is _CHOICE:
            made = self._node(op_of(aten.where.self), tuple([self._scalar(x) for x in args]), {})
            made.set_results((_layout(torch.where(*[torch.empty((), dtype=v.layout.dtype) for v in made.args])),), 0)
            return made.value
        if target in NO_COMPUTATION:
            return None
        if target in TABLE:
            return self._higher_order(TABLE[target], args)
        if target is _COPY:
            return self._copied(args[0], args[1])
        op = op_of(target)
        kinds = {a.name: a.kind for a in op.arguments}
        kept = {k: _plain(v) for k, v in kwargs.items() if kinds[k] not in ("ignored", "generator")}
        made = self._node(op, _plain(tuple(args)), kept)
        layouts: list[Layout | None] = []
        try:
            made.set_results(*_results(node.meta["val"], layouts))
        except (ValueError, RuntimeError) as error:  # torch raises one of several where a size has no number
            raise UnsupportedOpError(
                f"the size of what {op.name} gives depends on the values of a tensor",
                at=self._site.describe(),
                fix="use a form of a fixed size: torch.where for x[mask], torch.nonzero_static for torch.nonzero",
            ) from error
        return _nested(made.structure, made.values)

    def _copied(self, target: Value, source: Any) -> Any:
        """``target.copy_(source)``, which AOTAutograd puts at the end of a graph for arguments that are written."""
        if target not in self.arguments:
            raise UnsupportedOpError(
                "a compiled graph writes to a tensor that is no argument", at=self._site.describe()
            )
        layout = target.layout
        if source.layout.size != layout.size:
            source = self._cast(op_of(aten.expand.default), source, list(layout.size), layout)
        if source.layout.dtype != layout.dtype:
            source = self._cast(op_of(aten._to_copy.default), source, layout.dtype, layout)
        self.written[self.arguments[target]] = source
        return source

    def _cast(self, op: Op, source: Value, wanted: Any, layout: TensorType) -> Value:
        named = {"dtype": wanted} if isinstance(wanted, torch.dtype) else {}
        made = self._node(op, (source,) if named else (source, wanted), named)
        dtype = layout.dtype if named else source.layout.dtype
        made.set_results((root_layout(layout.size, torch.empty(layout.size, device="meta").stride(), dtype),), 0)
        return made.value

    def _arithmetic(self, target: Any, args: Sequence[Any]) -> Any:
        if not any(type(x) is Value for x in args):
            return target(*args)
        made = self._node(op_of(_ARITHMETIC[target]), tuple(args), {})
        operands = [torch.empty((), dtype=x.layout.dtype) if type(x) is Value else x for x in args]
        made.set_results((_layout(target(*operands)),), 0)
        return made.value

    def _higher_order(self, higher: HigherOrder, args: Sequence[Any]) -> list[Value | None]:
        named = dict(zip(higher.arguments, args, strict=True))
        layouts = {}
        for name, kind in higher.arguments.items():
            if kind == "tensors":
                named[name] = list(named[name])
                layouts[name] = [x.layout for x in named[name] if type(x) is Value]
        random = any(x.random for x in args if isinstance(x, Subgraph))
        made = self._node(higher.recorded(random), tuple(named.values()), {})
        made.set_results(tuple(result_layouts(higher, named, layouts)), 0)
        bodies = [x for x in args if isinstance(x, Subgraph)]
        return with_constants(bodies[-1], made.values)

    def _node(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Node:
        node = Node(self.last)
        node.op, node.args, node.kwargs, node.site = op, args, kwargs, self._site
        node.key = (op, node.depth)
        if op.random:
            floats, ints, complexes = node.counts
            kwargs["rng"] = Number("i", ints, "rng")
            node.counts = (floats, ints + 2, complexes)
        self.last = node
        return node


def with_constants(body: Subgraph, values: Sequence[Any]) -> list[Any]:
    """What a higher-order op returns: its values, and what the body gives that is no tensor."""
    results = list(values)
    for position, constant in body.constants:
        results.insert(position, constant)
    return results


def _results(types: Any, layouts: list[Layout | None]) -> tuple[tuple[Layout | None, ...], Any]:
    def visit(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return [visit(e) for e in x]
        layouts.append(_layout(x))
        return len(layouts) - 1

    structure = visit(types)
    return tuple(layouts), structure


def _layout(tensor: Any) -> Layout | None:
    """The layout of a new tensor like this one; None for what is no tensor."""
    if not isinstance(tensor, torch.Tensor):
        return None
    size, stride = tuple([int(n) for n in tensor.shape]), tuple([int(n) for n in tensor.stride()])
    if not prod(size):
        return result_layout(torch.empty(size, dtype=tensor.dtype, device="meta"))
    return result_layout(torch.empty_strided(size, stride, dtype=tensor.dtype, device="meta"))


def _nested(structure: Any, values: Sequence[Any]) -> Any:
    return values[structure] if isinstance(structure, int) else [_nested(s, values) for s in structure]


def _plain(x: Any) -> Any:
    """FX's immutable lists and tuples as the plain ones that rules are given."""
    if isinstance(x, tuple):
        return tuple([_plain(e) for e in x])
    return [_plain(e) for e in x] if isinstance(x, list) else x
