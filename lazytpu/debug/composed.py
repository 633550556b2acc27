"""Ops of which torch has kernels for other devices than the CPU, composed of ops that it has there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lazytpu.ir.tree import Node

aten = torch.ops.aten
_Grads = list[torch.Tensor | None]

# The position of ``dropout_p`` among the arguments.
_DROPOUT = {
    aten._scaled_dot_product_fused_attention_overrideable.default: 4,
    aten._scaled_dot_product_fused_attention_overrideable_backward.default: 12,
}


def draws(node: Node) -> bool:
    """Whether the results of an op depend on random numbers; those of attention do where it has dropout."""
    position = _DROPOUT.get(node.op.recorded)
    if position is None:
        return bool(node.op.random)
    given = node.args[position] if position < len(node.args) else node.kwargs.get("dropout_p", 0.0)
    return not isinstance(given, float) or given > 0  # a number that is an input counts as some


def _linear_backward(x: Any, grad: Any, weight: Any, mask: list[bool]) -> _Grads:
    rows = grad.flatten(0, -2)
    return [
        grad @ weight if mask[0] else None,
        rows.mT @ x.flatten(0, -2) if mask[1] else None,
        rows.sum(0) if mask[2] else None,
    ]


def _weighted(
    q: Any, k: Any, v: Any, bias: Any, is_causal: bool, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result of attention without dropout, and the logarithms of the sums of its rows."""
    groups = q.shape[-3] // k.shape[-3]
    if groups > 1:
        k, v = (x.repeat_interleave(groups, -3) for x in (k, v))
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(dtype) @ k.to(dtype).mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias.to(dtype)
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    empty = (scores == -torch.inf).all(-1, keepdim=True)
    weights = scores.softmax(-1).masked_fill(empty, 0.0)
    return (weights @ v.to(dtype)).to(q.dtype), scores.logsumexp(-1)


def _attention(
    q: Any,
    k: Any,
    v: Any,
    bias: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
    rng: Any = None,
) -> Sequence[Any]:
    key = torch.zeros((), dtype=torch.int64)  # nothing was drawn
    return *_weighted(q, k, v, bias, is_causal, scale), None, None, None, None, key, key, None


def _attention_backward(
    grad: Any, q: Any, k: Any, v: Any, bias: Any, wanted: list[bool], *rest: Any, scale: float | None = None
) -> _Grads:
    is_causal = rest[-3]
    with torch.enable_grad():
        given = [
            None if x is None else x.detach().requires_grad_(w) for x, w in zip((q, k, v, bias), wanted, strict=True)
        ]
        result, _ = _weighted(given[0], given[1], given[2], given[3], is_causal, scale)
        found = iter(torch.autograd.grad(result, [x for x in given if x is not None and x.requires_grad], grad))
    return [next(found) if want else None for want in wanted]


COMPOSED: dict[Any, Callable[..., Any]] = {
    aten.linear_backward.default: _linear_backward,
    aten._scaled_dot_product_fused_attention_overrideable.default: _attention,
    aten._scaled_dot_product_fused_attention_overrideable_backward.default: _attention_backward,
}
"""Op to a function of its arguments that gives its results."""
