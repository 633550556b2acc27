"""Long chains of elementwise ops whose links have other readers too: the state of a loop over time, its gradient.

XLA on CPUs computes a cheap value anew in the loop of each of its readers.  In such a chain the loop of the n-th reader
holds all of the chain up to there, so that programs, and the time to compile and to run them, grow with the square of
its length: the gradient of fifty steps of ``LSTMCell`` took two minutes to compile.  Here the links are found that are
to be in memory, so that no loop holds more than some hundred ops; `kept` puts them there.
"""

from __future__ import annotations

from collections import Counter
from typing import cast

import jax
import torch

from lazytpu.ir.graph import Graph
from lazytpu.ir.tree import Node, Value, operands
from lazytpu.lowering.registry import on_one_cpu
from lazytpu.lowering.support.calls import apart

aten = torch.ops.aten
_LONGEST = 96  # ops
_SEVERAL = {  # ops of several elementwise ones, and how many these are
    aten._thnn_fused_gru_cell.default: 12,
    aten._thnn_fused_gru_cell_backward.default: 16,
    aten._thnn_fused_lstm_cell.default: 12,
    aten._thnn_fused_lstm_cell_backward_impl.default: 16,
}
_MOVING = {  # they compute nothing, and XLA fuses them as well
    aten.cat.default,
    aten.clone.default,
    aten.expand.default,
    aten.permute.default,
    aten.select.int,
    aten.slice.Tensor,
    aten.t.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.view.default,
}


def links_to_keep(graph: Graph) -> frozenset[Value]:
    """Return the values that are computed once, for all of their readers; none but on one CPU."""
    if not on_one_cpu() or len(graph.nodes) < _LONGEST // max(_SEVERAL.values()):
        return frozenset()
    readers: Counter[Value] = Counter()
    for node in graph.nodes:
        for x in {*operands(node)}:
            if type(x) is Value:
                readers[x] += 2 if node.op.recorded in _SEVERAL else 1
    lengths: dict[Value, int] = {}
    kept = []
    for node in graph.nodes:
        ops = _elementwise_ops(node)
        if not ops:
            continue
        length = ops + max([lengths.get(x, 0) for x in operands(node) if type(x) is Value], default=0)
        for value in node.values:
            if value is not None:
                lengths[value] = length
                if length > _LONGEST and readers[value] > 1:
                    kept.append(value)
                    lengths[value] = 0
    return frozenset(kept)


def _elementwise_ops(node: Node) -> int:
    """Return how many elementwise ops a node is, 0 where it is something else."""
    op = node.op.recorded
    if op in _MOVING or torch.Tag.pointwise in getattr(op, "tags", ()):
        return 1
    return _SEVERAL.get(op, 0)


def kept(x: jax.Array) -> jax.Array:
    """Return ``x``, which XLA computes once."""
    return cast(jax.Array, apart(_same)(x))


def _same(x: jax.Array) -> jax.Array:
    return x
