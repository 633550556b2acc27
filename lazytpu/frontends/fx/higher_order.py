"""Torch's higher-order ops (`torch.cond`, loops, scans) as ops of the IR: their arguments by name and kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch._higher_order_ops.associative_scan import associative_scan_op
from torch._higher_order_ops.cond import cond_op
from torch._higher_order_ops.map import map_impl
from torch._higher_order_ops.scan import scan_op
from torch._higher_order_ops.while_loop import while_loop_op

from lazytpu.ir.op_schema import Argument, Op
from lazytpu.ir.subgraph import Subgraph
from lazytpu.ir.types import TensorType
from lazytpu.tensors.layout import Layout, in_rows


@dataclass(frozen=True, slots=True)
class HigherOrder:
    """How one higher-order op is called.

    Attributes:
        op: torch's op.
        arguments: name to kind: ``body``, ``tensor`` or ``tensors``.
        body_inputs: the names of the arguments that its bodies take, in order; those with a ``*`` are taken slice by
            slice along the first dimension.
        carried: the name of the argument whose types the first results have, else empty.
    """

    op: Any
    arguments: dict[str, str]
    body_inputs: tuple[str, ...]
    carried: str = ""

    def recorded(self, random: bool) -> Op:
        """Return the op as a node shows it."""
        return _ops[self.op, random]


TABLE: dict[Any, HigherOrder] = {
    h.op: h
    for h in (
        HigherOrder(
            cond_op,
            {"pred": "tensor", "true_graph": "body", "false_graph": "body", "operands": "tensors"},
            ("operands",),
        ),
        HigherOrder(
            while_loop_op,
            {"cond": "body", "body": "body", "carried": "tensors", "additional": "tensors"},
            ("carried", "additional"),
            "carried",
        ),
        HigherOrder(
            scan_op,
            {"combine": "body", "init": "tensors", "xs": "tensors", "additional": "tensors"},
            ("init", "xs*", "additional"),
            "init",
        ),
        HigherOrder(
            associative_scan_op,
            {"combine": "body", "xs": "tensors", "additional": "tensors"},
            ("xs*", "xs*", "additional"),
        ),
        HigherOrder(map_impl, {"f": "body", "xs": "tensors", "args": "tensors"}, ("xs*", "args")),
    )
}

_KIND = {"body": "attr", "tensor": "tensor", "tensors": "tensors"}


def _op(higher: HigherOrder, random: bool) -> Op:
    arguments = tuple(Argument(name, _KIND[kind], False, None, False) for name, kind in higher.arguments.items())
    positions = {a.name: i for i, a in enumerate(arguments)}
    return Op(higher.op, higher.op, higher.op.name(), arguments, None, random, positions)


_ops = {(h.op, random): _op(h, random) for h in TABLE.values() for random in (False, True)}


def result_layouts(
    higher: HigherOrder, named: dict[str, object], layouts: Mapping[str, Sequence[TensorType]]
) -> list[Layout]:
    """Return the types of the results of a call.

    Args:
        named: the arguments by name; of these only the bodies are looked at.
        layouts: those of the arguments that are lists of tensors.
    """
    bodies = [b for b in named.values() if isinstance(b, Subgraph)]
    results = [v.layout for v in bodies[-1].graph.outputs]
    if higher.carried == "carried":
        return [in_rows(lay.size, lay.dtype) for lay in layouts["carried"]]
    if higher.op is associative_scan_op:
        return [in_rows(lay.size, lay.dtype) for lay in layouts["xs"]]
    if not higher.body_inputs[0].endswith("*") and higher.op is not scan_op:
        return [in_rows(lay.size, lay.dtype) for lay in results]
    length = layouts["xs"][0].size[0]
    carried = len(layouts["init"]) if higher.op is scan_op else 0
    stacked = [in_rows((length, *r.size), r.dtype) for r in results[carried:]]
    return [in_rows(r.size, r.dtype) for r in results[:carried]] + stacked
