"""Kernels of ops that torch has only as one fused kernel: written in other torch ops, which are recorded."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from lazytpu.record import is_device_tensor
from lazytpu.special import kernel


@kernel("_native_multi_head_attention")
def native_multi_head_attention(
    query: Any,
    key: Any,
    value: Any,
    embed_dim: int,
    num_head: int,
    qkv_weight: Any,
    qkv_bias: Any,
    proj_weight: Any,
    proj_bias: Any,
    mask: Any = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[Any, Any]:
    """The inference path of ``nn.MultiheadAttention``; a mask is True where attention is switched off."""
    weights, biases = qkv_weight.chunk(3), qkv_bias.chunk(3)
    heads = [
        F.linear(x, w, b).unflatten(-1, (num_head, embed_dim // num_head)).transpose(1, 2)
        for x, w, b in zip((query, key, value), weights, biases, strict=True)
    ]
    scores = (heads[0] * (embed_dim // num_head) ** -0.5) @ heads[1].transpose(-2, -1)
    if mask is not None:
        scores = scores.masked_fill(_four_dims(mask, mask_type), float("-inf"))
    attention = torch.nan_to_num(scores.softmax(-1))  # a row that sees nothing attends to nothing
    out = F.linear((attention @ heads[2]).transpose(1, 2).flatten(-2), proj_weight, proj_bias)
    if not need_weights:
        return out, torch.empty(0, dtype=out.dtype, device=out.device)
    return out, attention.mean(1) if average_attn_weights else attention


def _four_dims(mask: torch.Tensor, mask_type: int | None) -> torch.Tensor:
    """A mask for scores [N, heads, L, S]; type 0 is [L, S], type 1 [N, S], type 2 has all dimensions."""
    mask = mask.to(torch.bool)
    if mask.dim() == 4:
        return mask
    return mask[:, None, None, :] if mask_type == 1 else mask if mask.dim() == 2 else mask[:, None]


@kernel("_transformer_encoder_layer_fwd")
def transformer_encoder_layer_fwd(
    src: Any,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Any,
    qkv_bias: Any,
    proj_weight: Any,
    proj_bias: Any,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Any,
    norm_bias_1: Any,
    norm_weight_2: Any,
    norm_bias_2: Any,
    ffn_weight_1: Any,
    ffn_bias_1: Any,
    ffn_weight_2: Any,
    ffn_bias_2: Any,
    mask: Any = None,
    mask_type: int | None = None,
) -> torch.Tensor:
    """The inference path of ``nn.TransformerEncoderLayer``."""

    def attend(x: torch.Tensor) -> torch.Tensor:
        projections = (qkv_weight, qkv_bias, proj_weight, proj_bias)
        out: torch.Tensor = native_multi_head_attention(
            x, x, x, embed_dim, num_heads, *projections, mask, False, True, mask_type
        )[0]
        return out

    def feed_forward(x: torch.Tensor) -> torch.Tensor:
        hidden = F.linear(x, ffn_weight_1, ffn_bias_1)
        return F.linear(F.gelu(hidden) if use_gelu else F.relu(hidden), ffn_weight_2, ffn_bias_2)

    def norm(x: torch.Tensor, weight: Any, bias: Any) -> torch.Tensor:
        return F.layer_norm(x, (embed_dim,), weight, bias, eps)

    if norm_first:
        src = src + attend(norm(src, norm_weight_1, norm_bias_1))
        return src + feed_forward(norm(src, norm_weight_2, norm_bias_2))
    src = norm(src + attend(src), norm_weight_1, norm_bias_1)
    return norm(src + feed_forward(src), norm_weight_2, norm_bias_2)


@kernel("_nested_tensor_from_mask_left_aligned")
def nested_tensor_from_mask_left_aligned(tensor: Any, mask: Any) -> bool:
    """Asked by ``nn.TransformerEncoder`` before it makes a nested tensor, which this device does not have."""
    return False


@kernel("_fused_sdp_choice")
def fused_sdp_choice(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> int:
    """Which form of attention `F.scaled_dot_product_attention` takes: one node, where a rule knows the case."""
    plain = all(x.dim() == 4 and x.is_floating_point() and 0 not in x.shape for x in (query, key, value))
    same_batch = query.shape[0] == key.shape[0] == value.shape[0]
    same_heads = enable_gqa or query.shape[1] == key.shape[1] == value.shape[1] if plain else False
    one_node = plain and same_batch and same_heads and is_device_tensor(query)
    return int(SDPBackend.OVERRIDEABLE.value if one_node else SDPBackend.MATH.value)
