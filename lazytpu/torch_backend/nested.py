"""Attention of nested tensors of the jagged layout, padded: torch's own forms of it are kernels of CUDA and the CPU."""

from __future__ import annotations

from collections.abc import Callable
from operator import methodcaller
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from lazytpu.tensors.tensor import LazyTensor
from lazytpu.torch_backend.after_import import after_import

_Attention = Callable[..., Tensor]


def register() -> None:
    """Wait for torch's ops of the jagged layout."""
    after_import("torch.nested._internal.ops", _take_over)


def _take_over(module: ModuleType) -> None:
    theirs: _Attention = module.jagged_scaled_dot_product_attention

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        given = (query, key, value)
        if attn_mask is not None or not all(_is_ours(x) for x in given):
            return theirs(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        return _padded(*given, dropout_p, is_causal, scale, enable_gqa)

    vars(module)["jagged_scaled_dot_product_attention"] = attention


def _is_ours(x: Tensor) -> bool:
    """Return whether a tensor is a batch [batch, heads, rows, width] on the device whose rows differ in number."""
    ours = x.is_nested and x.device.type == LazyTensor.device_type and x.dim() == 4
    return ours and isinstance(x.size(2), torch.SymInt)


_offsets: Callable[[Tensor], Tensor] = methodcaller("offsets")  # of torch's class for nested tensors


def _padded(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool, scale: float | None, enable_gqa: bool
) -> Tensor:
    offsets, ends = _offsets(query), _offsets(key)
    q, k, v = (x.transpose(1, 2).to_padded_tensor(0.0).transpose(1, 2) for x in (query, key, value))
    length, keys = q.shape[2], torch.arange(k.shape[2], device=ends.device)
    mask = (keys < ends.diff()[:, None])[:, None, None]
    if is_causal:
        mask = mask & (torch.arange(length, device=ends.device)[:, None] >= keys)
    found = F.scaled_dot_product_attention(q, k, v, mask, dropout_p, scale=scale, enable_gqa=enable_gqa)
    row = torch.arange(query.transpose(1, 2).values().shape[0], device=ends.device)
    batch = torch.searchsorted(offsets, row, right=True) - 1
    values = found.transpose(1, 2).flatten(0, 1).index_select(0, batch * length + row - offsets[batch])
    return torch.nested.nested_tensor_from_jagged(values, offsets).transpose(1, 2)
