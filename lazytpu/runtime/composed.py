"""Compose ops for which torch has no CPU kernel of ops for which it has one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lazytpu.ir.tree import Node

aten = torch.ops.aten
_Results = Sequence[Tensor | None]

# The position of ``dropout_p`` among the arguments.
_DROPOUT = {
    aten._scaled_dot_product_fused_attention_overrideable.default: 4,
    aten._scaled_dot_product_fused_attention_overrideable_backward.default: 12,
}


def is_random(node: Node) -> bool:
    """Return whether an op uses random numbers; attention does where it has dropout."""
    position = _DROPOUT.get(node.op.recorded)
    if position is None:
        return bool(node.op.random)
    dropout = node.args[position] if position < len(node.args) else node.kwargs.get("dropout_p", 0.0)
    return not isinstance(dropout, float) or dropout > 0  # a scalar input may be any


def _linear_backward(x: Tensor, grad: Tensor, weight: Tensor, mask: list[bool]) -> _Results:
    rows = grad.flatten(0, -2)
    return [
        grad @ weight if mask[0] else None,
        rows.mT @ x.flatten(0, -2) if mask[1] else None,
        rows.sum(0) if mask[2] else None,
    ]


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
    rng: None = None,
) -> _Results:
    """Compute attention without dropout; of the other eight results nothing is compared."""
    grouped = query.shape[-3] != key.shape[-3]
    found: Tensor = aten._scaled_dot_product_attention_math(
        query, key, value, bias, 0.0, is_causal, scale=scale, enable_gqa=grouped
    )[0]
    return [found, *[None] * 8]


def _attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    wanted: list[bool],
    *rest: object,
    scale: float | None = None,
) -> _Results:
    q, k, v = (x.detach().requires_grad_() for x in (query, key, value))
    b = None if bias is None else bias.detach().requires_grad_()
    with torch.enable_grad():
        result = _attention(q, k, v, b, is_causal=bool(rest[-3]), scale=scale)[0]
    assert result is not None
    learned = [x for x, want in zip((q, k, v, b), wanted, strict=True) if want and x is not None]
    found = iter(torch.autograd.grad(result, learned, grad))
    return [next(found) if want else None for want in wanted]


COMPOSED: dict[torch._ops.OpOverload, Callable[..., _Results]] = {
    aten.linear_backward.default: _linear_backward,
    aten._scaled_dot_product_fused_attention_overrideable.default: _attention,
    aten._scaled_dot_product_fused_attention_overrideable_backward.default: _attention_backward,
}
"""Op to a function of its arguments that returns its results."""
