"""Gradients that are sparse tensors, of layers with ``sparse=True`` whose backward pass is one kernel in torch."""

from __future__ import annotations

import torch
from torch import Tensor

from lazytpu.dispatch import handwritten
from lazytpu.dispatch.general import functional
from lazytpu.ir.op_schema import aten

_dense = functional(aten._embedding_bag_backward.default)
_MEAN = 1


@handwritten.kernel("_embedding_bag_backward")
def embedding_bag_backward(
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor,
    offset2bag: Tensor,
    bag_size: Tensor,
    maximum_indices: Tensor,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Tensor | None,
    padding_idx: int = -1,
) -> object:
    """Give the rows that ``nn.EmbeddingBag(sparse=True)`` took as a COO tensor; else the dense gradient, one node."""
    if not sparse or grad.device.type == "meta":
        given = (offsets, offset2bag, bag_size, maximum_indices, num_weights, scale_grad_by_freq, mode, sparse)
        return _dense(grad, indices, *given, per_sample_weights, padding_idx)
    every = torch.arange(indices.shape[0], device=offsets.device, dtype=offsets.dtype)
    bag = torch.searchsorted(offsets, every, right=True) - 1
    rows = grad.index_select(0, bag)
    if mode == _MEAN:
        rows = rows / bag_size.index_select(0, bag).clamp(min=1).unsqueeze(1)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(1)
    return aten.embedding_backward.default(rows, indices, num_weights, padding_idx, scale_grad_by_freq, True)
