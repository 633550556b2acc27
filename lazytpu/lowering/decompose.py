"""Ops without a rule: torch's own decompositions, traced into ops that have one.

This happens at lowering time, so the recorded graph shows what the user called.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map

from lazytpu.lowering.registry import rule_of


def decomposition_of(op: torch._ops.OpOverload) -> Any:
    """The function torch decomposes ``op`` by, or None."""
    found = decomposition_table.get(op)
    if found is None and torch._C._dispatch_has_kernel(op.name()) and _is_composite(op):
        return op.decompose
    return found


def decompositions() -> dict[torch._ops.OpOverload, Any]:
    """The table of decompositions in use: each op without a rule that torch can write in other ops, to the function.

    A copy: changing it changes nothing.  ``torch.compile`` graphs, recorded graphs and exported ones are lowered by
    the same rules and, where there is none, by this table.

    Example:
        >>> torch.ops.aten.addcdiv.default in lazytpu.lowering.decompositions()
        False
    """
    return {op: function for op, function in Undecomposed().items() if isinstance(op, torch._ops.OpOverload)}


def _is_composite(op: torch._ops.OpOverload) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


class Undecomposed(dict[Any, Any]):
    """Decompositions of every op that has no rule, for make_fx."""

    def __init__(self) -> None:
        table: dict[Any, Any] = dict(decomposition_table)
        super().__init__((op, f) for op, f in table.items() if rule_of(op) is None)


def trace_decomposition(op: torch._ops.OpOverload, args: Any, kwargs: Any) -> torch.fx.GraphModule:
    """An FX graph of ops with rules that computes ``op(*args, **kwargs)``.

    Args:
        op: an overload without a rule.
        args, kwargs: its arguments, with meta tensors for the tensors.
    """
    function = decomposition_of(op)
    if function is None:
        raise NotImplementedError(f"{op} has no lowering and no decomposition")
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:

        def fake(x: Any) -> Any:
            return torch.empty(x.shape, dtype=x.dtype) if isinstance(x, torch.Tensor) else x

        with mode:
            args, kwargs = tree_map(fake, (args, kwargs))
        leaves, spec = torch.utils._pytree.tree_flatten((args, kwargs))
        positions = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]

        def call(*tensors: torch.Tensor) -> Any:
            full = list(leaves)
            for i, t in zip(positions, tensors, strict=True):
                full[i] = t
            a, k = torch.utils._pytree.tree_unflatten(full, spec)
            return function(*a, **k)

        with torch.no_grad():
            return make_fx(call, decomposition_table=Undecomposed(), tracing_mode="fake")(
                *[leaves[i] for i in positions]
            )
