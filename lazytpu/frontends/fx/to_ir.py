"""From an FX graph of aten ops, as torch.compile and make_fx give it, to a graph of the IR.

Nothing is lowered here: the nodes refer to the same ops as recorded ones do, and go through the same rules.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from math import prod
from operator import attrgetter
from typing import Any

import torch
from torch._higher_order_ops.effects import with_effects
from torch.fx.node import Target

from lazytpu.errors import UnsupportedOpError
from lazytpu.frontends.fx.higher_order import TABLE, result_layouts
from lazytpu.ir.graph import graph_of
from lazytpu.ir.op_schema import NO_COMPUTATION, Op, OpOverload, aten, op_of
from lazytpu.ir.site import UNKNOWN
from lazytpu.ir.subgraph import Subgraph, interned
from lazytpu.ir.tree import Node, Number, Value
from lazytpu.ir.types import TensorType, is_dense, memory_order
from lazytpu.location.fx_site import site_of
from lazytpu.lowering.decompose import can_lower
from lazytpu.lowering.fx import AtenInterpreter
from lazytpu.lowering.registry import Args, Kwargs
from lazytpu.tensors.layout import Layout
from lazytpu.tracing.infer import result_layout
from lazytpu.tracing.record import VIEW_OPS

_READ = aten._local_scalar_dense.default
_LITERAL = 256  # elements of a tensor that is written out in a body
_SAME = {aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.lift.default, _READ}
_COPY = aten.copy_.default
_INDEX = aten.index.Tensor
STRIDED = {aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default}
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
_CHOICE = torch.sym_ite


def unsupported_ops(module: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    """Yield what a graph holds that neither a rule nor a decomposition lowers."""
    for node in module.graph.nodes:
        if node.op == "call_function" and not _is_known(node.args[1] if node.target is with_effects else node.target):
            yield node
        elif node.op in ("call_module", "call_method"):
            yield node
        elif node.op == "get_attr":
            found = attrgetter(str(node.target))(module)
            if isinstance(found, torch.fx.GraphModule):
                yield from unsupported_ops(found)


def _is_known(target: object) -> bool:
    if target in (operator.getitem, _COPY, _CHOICE) or target in _ARITHMETIC:
        return True
    if target in TABLE or target in _SAME or target in NO_COMPUTATION:
        return True
    return isinstance(target, OpOverload) and not target._schema.is_mutable and can_lower(target)


def subgraph_of(module: torch.fx.GraphModule) -> Subgraph:
    """Return the body that an FX graph computes.

    Raises:
        UnsupportedOpError: it writes to an argument, or holds a large tensor.
    """
    types = [n.meta.get("val") for n in module.graph.find_nodes(op="placeholder")]  # a size that is known has none
    layouts = [_layout_like(x) if isinstance(x, torch.Tensor) else None for x in types]
    body = Conversion(module, layouts, is_body=True)
    if body.written:
        raise UnsupportedOpError(
            "a branch or the body of a loop writes to its argument", fix="return the new value instead"
        )
    constants = tuple((i, r) for i, r in enumerate(body.results) if type(r) is not Value)
    graph = graph_of(body.last, tuple([r for r in body.results if type(r) is Value]))
    return interned(graph, tuple([v.index for v in graph.inputs]), constants)


class Conversion(AtenInterpreter):
    """Convert one FX graph of functional aten ops, which may copy to its arguments at its end.

    Attributes:
        last: the last node; `graph_of` prunes the path to it.
        results: what the graph returns: a `Value`, or anything else as it is.
        arguments: the values that stand for whole arguments, to their positions.
        written: positions of arguments to the values that are copied into them.
        env: what each FX node stands for.
        captured: the tensors the graph holds; they are inputs after the arguments.
    """

    def __init__(
        self, module: torch.fx.GraphModule, layouts: Sequence[Layout | None], *, is_body: bool = False
    ) -> None:
        """Convert.

        Args:
            module: the nodes carry their types in ``meta["val"]``, of fixed sizes.
            layouts: how the arguments lie in their storages, None for those that are no tensors.
            is_body: it is the body of a loop or a branch.
        """
        super().__init__(module, keep_values=True)
        self._is_body, self._layouts = is_body, layouts
        self.last = Node(None)
        self.arguments: dict[Value, int] = {}
        self._storages: dict[torch.fx.Node, Value] = {}  # of the arguments
        self.written: dict[int, Value] = {}
        self.captured: list[torch.Tensor] = []
        self._site = UNKNOWN
        returned = self.evaluate(*range(len(layouts)))
        self.results: list[object] = list(returned) if isinstance(returned, (list, tuple)) else [returned]

    def run_node(self, n: torch.fx.Node) -> object:
        self._site = site_of(n)
        return super().run_node(n)

    def placeholder(self, target: Target, args: Args, kwargs: Kwargs) -> object:
        position: int = super().placeholder(target, args, kwargs)
        layout = self._layouts[position]
        if layout is None:
            return self.node.meta.get("val")
        root = Value(None, position, layout.root)
        value = self._read(root, layout)
        self.arguments[value], self._storages[self.node] = position, root
        return value

    def _read(self, root: Value, layout: Layout) -> Value:
        """Return the value that lies at ``layout`` in a storage that holds ``root``: the chain of view ops."""
        if layout.parent is None:
            return root
        op = VIEW_OPS[layout.op] if isinstance(layout.op, str) else layout.op
        node = self._record(op, (self._read(root, layout.parent), *layout.args), {})
        node.set_results((layout,), 0)
        return node.value

    def body(self, module: torch.fx.GraphModule) -> Subgraph:
        return subgraph_of(module)

    def constant(self, found: Any) -> Any:
        if not isinstance(found, torch.Tensor):
            return found
        if not self._is_body:
            self.captured.append(found)
            return Value(None, len(self._layouts) + len(self.captured) - 1, _layout_like(found))
        if found.numel() > _LITERAL:
            raise UnsupportedOpError(
                f"a branch or the body of a loop holds a tensor of {tuple(found.shape)}",
                at=self._site.describe(),
                fix="give it as an operand",
            )
        return self._literal(found.detach().cpu())

    def call_function(self, target: Target, args: Args, kwargs: Kwargs) -> Any:
        if target in _ARITHMETIC and any(type(x) is Value for x in args):
            return self._arithmetic(_ARITHMETIC[target], target, args)
        if target is _CHOICE:
            return self._arithmetic(aten.where.self, torch.where, [self._scalar(x) for x in args])
        return super().call_function(target, args, kwargs)

    def call_aten(self, op: OpOverload, args: Args, kwargs: Kwargs) -> object:
        if op in _SAME:
            return args[0]
        if op is _COPY:
            return self._copied(args[0], args[1])
        if op is aten.as_strided_scatter.default:
            return self._strided_write(op, args, kwargs)
        if op in STRIDED:
            return self._strided_read(op, args, kwargs)
        return self._called(op, args, kwargs)

    def _called(self, op: OpOverload, args: Args, kwargs: Kwargs) -> object:
        recorded = op_of(op)
        kinds = {a.name: a.kind for a in recorded.arguments}
        node = self._record(
            recorded, args, {k: v for k, v in kwargs.items() if kinds[k] not in ("ignored", "generator")}
        )
        layouts: list[Layout | None] = []
        try:
            if op is _INDEX and any(type(i) is Value and i.layout.dtype is torch.bool for i in args[1]):
                raise ValueError  # a mask; later ops may have told its size
            node.set_results(*_results(self.node.meta["val"], layouts))
        except (ValueError, RuntimeError) as error:  # torch raises one of several where a size has no number
            raise UnsupportedOpError(
                f"the size of what {recorded.name} gives depends on the values of a tensor",
                at=self._site.describe(),
                fix="use a form of a fixed size: torch.where for x[mask], torch.nonzero_static for torch.nonzero",
            ) from error
        return _nested(node.structure, node.values)

    def _strided_read(self, op: OpOverload, args: Args, kwargs: Kwargs) -> object:
        """Call an ``as_strided``: its rule takes the operand for memory, so it is given that of the storage."""
        node = self.node.args[0]
        assert isinstance(node, torch.fx.Node)
        size, stride, offset = (*args[1:], *kwargs.values(), None)[:3]
        base = base_of(node)
        value, begin = self.env[base], base.meta["val"].storage_offset()
        inside = node.meta["val"].storage_offset() - begin if offset is None else offset - begin
        if base in self._storages:  # an argument may begin elsewhere than the one of the first call
            layout = self._layouts[self.arguments[value]]
            assert layout is not None
            value, inside = self._storages[base], layout.offset + inside if offset is None else offset
        memory, _ = self._memory_of(value, size, stride, inside)
        return self._called(op, (memory, size, stride, inside), {})

    def _strided_write(self, op: OpOverload, args: Args, kwargs: Kwargs) -> object:
        """Call an ``as_strided_scatter`` on the memory of its operand, and give the result the operand's order."""
        node = self.node.args[0]
        assert isinstance(node, torch.fx.Node)
        source, size, stride, offset = (*args[1:], *kwargs.values(), None)[:4]
        inside = 0 if offset is None else offset - node.meta["val"].storage_offset()
        memory, order = self._memory_of(self.env[node], size, stride, inside)
        if order == sorted(order):
            return self._called(op, (memory, source, size, stride, inside), {})
        record = self._record(op_of(op), (memory, source, size, stride, inside), {})
        found = self._result(record, torch.empty(memory.layout.size, dtype=memory.layout.dtype, device="meta"))
        return self._permuted(found, [order.index(d) for d in range(len(order))])

    def _memory_of(
        self, value: Value, size: Sequence[int], stride: Sequence[int], offset: int
    ) -> tuple[Value, list[int]]:
        """Return the elements of a value as they lie in memory, and the order of its dimensions there.

        Raises:
            UnsupportedOpError: some of what ``size``, ``stride`` and ``offset`` reach is not among them.
        """
        span = 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
        dense = is_dense(value.layout.size, value.layout.stride)
        if not dense or offset < 0 or 0 not in size and offset + span > prod(value.layout.size):
            raise UnsupportedOpError(
                "as_strided reaches memory that a compiled graph does not have",
                at=self._site.describe(),
                fix="call it outside of the compiled function, or on the tensor that owns the memory",
            )
        order = list(memory_order(value.layout))
        return value if order == sorted(order) else self._permuted(value, order), order

    def _permuted(self, value: Value, order: Sequence[int]) -> Value:
        node = self._record(op_of(aten.permute.default), (value, list(order)), {})
        lying = torch.empty_strided(value.layout.size, value.layout.stride, dtype=value.layout.dtype, device="meta")
        return self._result(node, lying.permute(list(order)))

    def higher_order(self, op: torch._ops.HigherOrderOperator, args: Args, kwargs: Kwargs) -> object:
        higher = TABLE[op]
        named = dict(zip(higher.arguments, args, strict=True))
        layouts: dict[str, list[TensorType]] = {}
        for name, kind in higher.arguments.items():
            if kind == "tensors":
                named[name] = list(named[name])
                layouts[name] = [x.layout for x in named[name] if type(x) is Value]
        bodies = [x for x in args if isinstance(x, Subgraph)]
        node = self._record(higher.recorded(any(x.random for x in bodies)), tuple(named.values()), {})
        node.set_results(tuple(result_layouts(higher, named, layouts)), 0)
        return with_constants(bodies[-1], node.values)

    def _copied(self, target: Value, source: Value) -> Value:
        """Note ``target.copy_(source)``, which AOTAutograd puts at the end of a graph for written arguments."""
        if target not in self.arguments:
            raise UnsupportedOpError(
                "a compiled graph writes to a tensor that is no argument", at=self._site.describe()
            )
        size, dtype = target.layout.size, target.layout.dtype
        if source.layout.size != size:
            node = self._record(op_of(aten.expand.default), (source, list(size)), {})
            source = self._result(node, torch.empty(size, dtype=source.layout.dtype, device="meta"))
        if source.layout.dtype != dtype:
            node = self._record(op_of(aten._to_copy.default), (source,), {"dtype": dtype})
            source = self._result(node, torch.empty(size, dtype=dtype, device="meta"))
        self.written[self.arguments[target]] = source
        return source

    def _arithmetic(self, op: OpOverload, function: Any, args: Sequence[Any]) -> Value:
        """Record arithmetic on numbers that are tensors here; ``function`` tells the type of the result."""
        node = self._record(op_of(op), tuple(args), {})
        return self._result(
            node, function(*[torch.empty((), dtype=x.layout.dtype) if type(x) is Value else x for x in args])
        )

    def _scalar(self, x: Any) -> Value:
        return x if type(x) is Value else self._full(torch.tensor(x, dtype=_NUMBER[type(x)]))

    def _literal(self, tensor: torch.Tensor) -> Value:
        """Record a tensor of few elements as a composition of them."""
        if tensor.numel() == 1:
            return self._full(tensor)
        elements = [self._full(x) for x in tensor.flatten()]
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        if not elements:
            return self._result(self._record(_FULL, (list(tensor.shape), 0), {"dtype": tensor.dtype}), empty)
        flat = self._result(self._record(op_of(aten.stack.default), (elements,), {}), empty.flatten())
        return self._result(self._record(op_of(aten.view.default), (flat, list(tensor.shape)), {}), empty)

    def _full(self, tensor: torch.Tensor) -> Value:
        node = self._record(_FULL, (list(tensor.shape), tensor.item()), {"dtype": tensor.dtype})
        return self._result(node, tensor)

    def _result(self, node: Node, like: torch.Tensor) -> Value:
        """Give a node its one result, of the type of a tensor."""
        node.set_results((_layout_like(like),), 0)
        return node.value

    def _record(self, op: Op, args: Args, kwargs: Kwargs) -> Node:
        node = Node(self.last)
        node.op, node.args, node.kwargs, node.site = op, args, kwargs, self._site
        node.key = (op, node.depth)
        if op.random:
            floats, ints, complexes = node.counts
            kwargs["rng"] = Number("i", ints, "rng")
            node.counts = (floats, ints + 2, complexes)
        self.last = node
        return node


def base_of(node: torch.fx.Node) -> torch.fx.Node:
    """Return the node whose result owns the memory of a node's result: what it is a view of, or itself."""
    while node.op == "call_function":
        target, operand = node.target, node.args[0] if node.args else None
        is_view = target is operator.getitem or isinstance(target, OpOverload) and target.is_view
        if not is_view or not isinstance(operand, torch.fx.Node) or not _is_part(target, operand):
            break
        node = operand
    return node


def _is_part(target: Target, operand: torch.fx.Node) -> bool:
    """Return whether what is taken of an operand is a view; a part of several results is one if these are views."""
    if target is not operator.getitem:
        return True
    return isinstance(operand.target, OpOverload) and operand.target.is_view


def with_constants(body: Subgraph, values: Sequence[object]) -> list[object]:
    """Return what a higher-order op returns: its values, and what the body gives that is no tensor."""
    results = list(values)
    for position, constant in body.constants:
        results.insert(position, constant)
    return results


def _results(types: Any, layouts: list[Layout | None]) -> tuple[tuple[Layout | None, ...], Any]:
    def visit(x: object) -> object:
        if isinstance(x, (list, tuple)):
            return [visit(e) for e in x]
        layouts.append(_layout_like(x) if isinstance(x, torch.Tensor) else None)
        return len(layouts) - 1

    structure = visit(types)
    return tuple(layouts), structure


def _layout_like(tensor: torch.Tensor) -> Layout:
    """Return the layout of a new tensor like this one."""
    size, stride = tuple([int(n) for n in tensor.shape]), tuple([int(n) for n in tensor.stride()])
    if not prod(size):
        return result_layout(torch.empty(size, dtype=tensor.dtype, device="meta"))
    return result_layout(torch.empty_strided(size, stride, dtype=tensor.dtype, device="meta"))


def _nested(structure: Any, values: Sequence[Any]) -> Any:
    return values[structure] if isinstance(structure, int) else [_nested(s, values) for s in structure]
