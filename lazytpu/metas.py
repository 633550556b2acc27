"""Types of the results of ops whose meta kernel torch lacks, or has wrong."""

from __future__ import annotations

import torch

_library = torch.library.Library("aten", "IMPL")


def _lstm_cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    cx: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, state and the gates, which the gradient needs.  Torch's own cannot do without biases."""
    gates = input_gates + hidden_gates  # raises where the sizes differ
    return cx.new_empty(cx.shape), cx.new_empty(cx.shape), gates


def _gru_cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    hx: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The new state, and the five parts of it that the gradient needs."""
    _ = input_gates + hidden_gates  # raises where the sizes differ
    return hx.new_empty(hx.shape), hx.new_empty((hx.shape[0], 5 * hx.shape[1]))


def _gru_cell_backward(
    grad: torch.Tensor, workspace: torch.Tensor, has_bias: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of the gates, the state and the biases."""
    batch, hidden = grad.shape
    gates = (batch, 3 * hidden)
    biases = (grad.new_empty(3 * hidden), grad.new_empty(3 * hidden)) if has_bias else (None, None)
    return grad.new_empty(gates), grad.new_empty(gates), grad.new_empty((batch, hidden)), *biases


def register() -> None:
    """Gives torch these kernels."""
    _library.impl("_thnn_fused_lstm_cell", _lstm_cell, "Meta")
    _library.impl("_thnn_fused_gru_cell", _gru_cell, "Meta")
    _library.impl("_thnn_fused_gru_cell_backward", _gru_cell_backward, "Meta")
