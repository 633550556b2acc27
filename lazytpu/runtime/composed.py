"""Compose ops for which torch has no CPU kernel, or none that bears all values, of ops for which it has one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lazytpu.dtypes import HALVES
from lazytpu.ir.tree import Node
from lazytpu.runtime.guarded_kernels import GUARDED
from lazytpu.runtime.recurrent_kernels import KERNELS

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


def matmul_backward(grad: Tensor, x: Tensor, other: Tensor, mask: Sequence[bool]) -> _Results:
    """Compute the gradients of a product of batches of matrices, or of rows and a matrix, by other products."""
    rows = (x, grad) if other.ndim > 2 else (x.flatten(0, -2), grad.flatten(0, -2))
    return [grad @ other.mT if mask[0] else None, rows[0].mT @ rows[1] if mask[1] else None]


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
    """Compute attention without dropout, and where that is free the logarithms of the sums of its rows."""
    bias = additive(bias, query.dtype)
    if has_flash(query, key, value, bias):
        found, sums = _flash(query, key, value, 0.0, is_causal, attn_mask=bias, scale=scale)
        return [found, sums.contiguous() if sums.dtype == torch.float32 else None, *[None] * 7]
    grouped = query.shape[-3] != key.shape[-3]
    found = aten._scaled_dot_product_attention_math(
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
    result: Tensor | None,
    sums: Tensor | None,
    *rest: object,
    scale: float | None = None,
) -> _Results:
    """Compute the gradients by hand: where a graph is cut, torch's autograd may be out of reach.

    Result and logarithms of sums may be those of more keys than are given here; None where they are of these.
    """
    bias = additive(bias, query.dtype)
    if query.dtype == torch.float64:
        result = sums = None  # torch keeps float32 of these
    if has_flash(query, key, value, bias) and not wanted[3]:
        grad = grad if grad.stride(-1) == 1 else grad.contiguous()
        if result is None or sums is None:
            result, sums = _flash(query, key, value, 0.0, bool(rest[-3]), attn_mask=bias, scale=scale)
        given = grad, query, key, value, result, sums, 0.0, bool(rest[-3])
        made = _flash_backward(*given, attn_mask=bias, scale=scale)
        return [x if want else None for x, want in zip((*made, None), wanted, strict=True)]
    kept = query.dtype
    grad, query, key, value = [x.float() if kept in HALVES else x for x in (grad, query, key, value)]
    groups = query.shape[-3] // key.shape[-3]
    keys, values = [x.repeat_interleave(groups, -3) if groups > 1 else x for x in (key, value)]
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = (query @ keys.mT) * factor
    if rest[-3]:  # is_causal
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).tril().logical_not(), -torch.inf)
    if bias is not None:
        scores = scores + bias
    slopes = grad @ values.mT
    if result is None or sums is None:
        weights: Tensor = aten._safe_softmax.default(scores, -1)
        along = (slopes * weights).sum(-1, keepdim=True)
    else:
        weights = (scores - sums.masked_fill(sums == -torch.inf, 0)[..., None]).exp()
        along = (grad * result.to(grad.dtype)).sum(-1, keepdim=True)
    slopes = weights * (slopes - along)
    found = [slopes @ keys * factor, slopes.mT @ query * factor, weights.mT @ grad, slopes]
    if groups > 1:
        found[1:3] = [x.unflatten(-3, (-1, groups)).sum(-3) for x in found[1:3]]
    if bias is not None:
        found[3] = slopes.sum_to_size(bias.shape)
    return [x.to(kept) if want else None for x, want in zip(found, wanted, strict=True)]


def _reshaped(x: Tensor, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Reshape; the strides are those of the user's memory, and ``x`` may lie in less."""
    return x.reshape(size)


def additive(bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return what is added to scores: minus infinity where a mask of booleans is False."""
    if bias is None or bias.dtype != torch.bool:
        return bias
    return torch.zeros(bias.shape, dtype=dtype).masked_fill_(~bias, -torch.inf)


_flash = aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def has_flash(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> bool:
    """Return whether the kernel that holds few scores at a time takes these, as torch asks: it does not ask itself."""
    if any(x is not None and x.stride(-1) != 1 for x in (query, key, value, bias)):
        return False
    sizes = {x.shape[-1] for x in (query, key, value)}
    heads = {x.shape[1] for x in (query, key, value)} if query.ndim == 4 else {0, 1}
    return len(sizes) == len(heads) == 1 and all(x.is_floating_point() and x.numel() for x in (query, key, value))


COMPOSED: dict[torch._ops.OpOverload, Callable[..., Tensor | _Results]] = {
    aten._efficientzerotensor.default: torch.zeros,  # torch's own has no memory
    aten._reshape_alias.default: _reshaped,
    aten._reshape_alias_copy.default: _reshaped,
    aten.linear_backward.default: _linear_backward,
    aten.matmul_backward.default: matmul_backward,
    aten._scaled_dot_product_fused_attention_overrideable.default: _attention,
    aten._scaled_dot_product_fused_attention_overrideable_backward.default: _attention_backward,
    **GUARDED,
    **KERNELS,
}
"""Op to a function of its arguments that returns its results."""
