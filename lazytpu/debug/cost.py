"""FLOPs of recorded ops: torch's own formulas for products, one for each element for any other computation.

The formulas are those of ``torch.utils.flop_counter``, which count a multiplication and an addition as two.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from lazytpu.ir.subgraph import Subgraph
from lazytpu.ir.tree import Node, Value, operands

aten = torch.ops.aten

# Ops that move data or make constants, and compute nothing.
_NO_COMPUTATION = frozenset(
    f"aten.{name}"
    for name in (
        "_to_copy _unsafe_index _unsafe_index_put _unsafe_view arange as_strided_scatter cat clone constant_pad_nd "
        "copy diagonal_scatter empty empty_like empty_strided eye fill flip full full_like gather index index_put "
        "index_select ones ones_like repeat roll scalar_tensor scatter select_backward select_scatter slice_backward "
        "slice_scatter stack zeros zeros_like"
    ).split()
)


def flops_of(node: Node) -> int:
    """Return the FLOPs of one op; those of a body are counted once for each iteration where their number is known."""
    overload = node.op.recorded
    bodies = [x for x in (*node.args, *node.kwargs.values()) if isinstance(x, Subgraph)]
    if bodies:
        return _iterations(node) * sum(flops_of(inner) for body in bodies for inner in body.graph.nodes)
    packet = getattr(overload, "overloadpacket", None)
    if getattr(overload, "is_view", False) or str(packet) in _NO_COMPUTATION:
        return 0
    formula = _FORMULAS.get(packet)
    if formula is not None:
        return formula(*[_size(x) for x in node.args])
    if packet in flop_registry:
        args, kwargs, results = tree_map(_size, (node.args, node.kwargs, node.values))
        return int(flop_registry[packet](*args, **kwargs, out_val=results if len(results) > 1 else results[0]))
    return max([prod(x.layout.size) for x in (*operands(node), *node.values) if type(x) is Value], default=0)


def _size(x: object) -> object:
    return x.layout.size if type(x) is Value else x


def _iterations(node: Node) -> int:
    """Return how often a loop runs; 1 for a condition, and for a loop that ends by a condition."""
    named = {name: node.args[i] for name, i in node.op.positions.items() if i < len(node.args)}
    if "layers" in named:
        return int(named["layers"])
    return int(named["xs"][0].layout.size[0]) if "xs" in named else 1


# Ops that torch's counter does not know, because other devices record them in parts.
_FORMULAS: dict[object, Callable[..., int]] = {
    aten.linear: lambda x, weight, *bias: 2 * prod(x) * weight[0],
    aten.linear_backward: lambda x, grad, weight, mask: 2 * prod(x) * weight[0] * (mask[0] + mask[1]),
    aten.matmul: lambda x, other: 2 * prod(x) * other[-1],
    aten.matmul_backward: lambda grad, x, other, mask: 2 * prod(x) * other[-1] * (mask[0] + mask[1]),
    aten._scaled_dot_product_fused_attention_overrideable: lambda *given: int(sdpa_flop_count(*given[:3])),
    aten._scaled_dot_product_fused_attention_overrideable_backward: (
        lambda *given: int(sdpa_backward_flop_count(*given[:4]))
    ),
}
