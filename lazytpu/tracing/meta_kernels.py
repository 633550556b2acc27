"""Types of the results of ops whose meta kernel torch lacks, or has wrong."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._decomp import decomposition_table

from lazytpu.runtime.composed import has_flash

_library = torch.library.Library("aten", "IMPL")


def _lstm_cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    cx: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return output, state and the gates, which the gradient needs.  Torch's own cannot do without biases."""
    gates = input_gates + hidden_gates  # raises where the sizes differ
    return cx.new_empty(cx.shape), cx.new_empty(cx.shape), gates


def _gru_cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    hx: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the new state, and the five parts of it that the gradient needs."""
    _ = input_gates + hidden_gates  # raises where the sizes differ
    return hx.new_empty(hx.shape), hx.new_empty((hx.shape[0], 5 * hx.shape[1]))


def _gru_cell_backward(
    grad: torch.Tensor, workspace: torch.Tensor, has_bias: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return gradients of the gates, the state and the biases."""
    batch, hidden = grad.shape
    gates = (batch, 3 * hidden)
    biases = (grad.new_empty(3 * hidden), grad.new_empty(3 * hidden)) if has_bias else (None, None)
    return grad.new_empty(gates), grad.new_empty(gates), grad.new_empty((batch, hidden)), *biases


def _multilabel_margin_loss(x: torch.Tensor, target: torch.Tensor, reduction: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss and which classes are targets: torch says ``[1]`` for one row, its CPU kernel gives ``[]``."""
    loss, is_target = decomposition_table[torch.ops.aten.multilabel_margin_loss_forward.default](x, target, reduction)
    return (loss.new_empty(()) if x.dim() < 2 else loss), is_target


def _multinomial(
    probabilities: torch.Tensor,
    num_samples: int,
    replacement: bool = False,
    *,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Return which categories were drawn, with the CPU's limit of their number."""
    if probabilities.dim() and probabilities.shape[-1] > 1 << 24:
        raise RuntimeError("number of categories cannot exceed 2^24")
    return probabilities.new_empty((*probabilities.shape[:-1], num_samples), dtype=torch.int64)


def _normal(mean: torch.Tensor, std: torch.Tensor, *, generator: torch.Generator | None = None) -> torch.Tensor:
    """Return a tensor of the dtype of the means, whatever that of the deviations: torch's own takes both together."""
    return mean.new_empty(torch.broadcast_shapes(mean.shape, std.shape))


def _nansum(
    x: torch.Tensor, dim: list[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return the sum over the dimensions, all if there are none of them: torch's own takes these for no dimension."""
    return torch.sum(x, dim, keepdim, dtype=dtype)


def _attention_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    grad_input_mask: Sequence[bool],
    *rest: object,
    **options: object,
) -> tuple[torch.Tensor | None, ...]:
    """Return gradients of query, key, value and bias: each as the CPU's kernel lays it out, else like what it is of.

    The CPU's kernel that holds few scores at a time, which takes no dropout, has the heads of a row side by side.
    """
    contiguous = torch.contiguous_format
    made = [torch.empty_like(x) for x in (query, key, value)]
    if rest[6] == 0 and not grad_input_mask[3] and has_flash(query, key, value, attn_bias):
        made = [torch.empty_like(x.transpose(1, 2), memory_format=contiguous) for x in (query, key, value)]
        made = [x.transpose(1, 2) for x in made]
    return *made, None if attn_bias is None else torch.empty_like(attn_bias)


def _roll(x: torch.Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> torch.Tensor:
    """Return a tensor with the strides of the CPU's, which concatenates two parts for each dimension."""
    expected: torch.Tensor = decomposition_table[torch.ops.aten.roll.default](x, shifts, dims)  # checks
    if len(dims) != 1 or not x.numel():
        return expected
    size = x.shape[dims[0]]
    start = (size - shifts[0]) % size
    return torch.cat([x.narrow(dims[0], start, size - start), x.narrow(dims[0], 0, start)], dims[0])


def _matmul_backward(
    grad: torch.Tensor, x: torch.Tensor, other: torch.Tensor, mask: Sequence[bool]
) -> list[torch.Tensor | None]:
    """Return the gradients of both factors; torch has them for nested tensors only."""
    return [t.new_empty(t.shape) if wanted else None for t, wanted in zip((x, other), mask, strict=True)]


_ATTENTION_BACKWARD = "_scaled_dot_product_fused_attention_overrideable_backward"


def register() -> None:
    """Give torch these kernels."""
    _library.impl(_ATTENTION_BACKWARD, _attention_backward, "Meta", allow_override=True)
    _library.impl("_thnn_fused_lstm_cell", _lstm_cell, "Meta", allow_override=True)
    _library.impl("_thnn_fused_gru_cell", _gru_cell, "Meta", allow_override=True)
    _library.impl("_thnn_fused_gru_cell_backward", _gru_cell_backward, "Meta", allow_override=True)
    _library.impl("normal.Tensor_Tensor", _normal, "Meta", allow_override=True)
    _library.impl("nansum", _nansum, "Meta", allow_override=True)
    _library.impl("roll", _roll, "Meta", allow_override=True)
    _library.impl("matmul_backward", _matmul_backward, "Meta", allow_override=True)
    _library.impl("multinomial", _multinomial, "Meta", allow_override=True)
    _library.impl("multilabel_margin_loss_forward", _multilabel_margin_loss, "Meta", allow_override=True)
