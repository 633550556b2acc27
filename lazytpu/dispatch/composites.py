"""Kernels of ops that torch has only as one fused kernel: written in other torch ops, which are recorded."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lazytpu.dispatch import generated
from lazytpu.dispatch.general import call_meta, functional, on_other_device
from lazytpu.dispatch.handwritten import kernel
from lazytpu.errors import UnsupportedOpError
from lazytpu.ir.op_schema import aten, op_of
from lazytpu.tensors.tensor import LazyTensor
from lazytpu.tracing.record import is_device_tensor


@kernel("unsafe_split.Tensor")
def unsafe_split(x: Tensor, size: int, dim: int = 0) -> Sequence[Tensor]:
    """Return views; that they are some is hidden from autograd alone."""
    views: Sequence[Tensor] = aten.split.Tensor(x, size, dim)
    return views


@kernel("unsafe_split_with_sizes")
def unsafe_split_with_sizes(x: Tensor, sizes: Sequence[int], dim: int = 0) -> Sequence[Tensor]:
    """Return views, as `unsafe_split` does."""
    views: Sequence[Tensor] = aten.split_with_sizes.default(x, sizes, dim)
    return views


@kernel("_native_multi_head_attention")
def native_multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_head: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,
    average_attn_weights: bool = True,
    mask_type: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute ``nn.MultiheadAttention`` in inference; a mask is True where attention is switched off."""
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


def _four_dims(mask: Tensor, mask_type: int | None) -> Tensor:
    """Return a mask for scores [N, heads, L, S]; type 0 is [L, S], type 1 [N, S], type 2 has all dimensions."""
    mask = mask.to(torch.bool)
    if mask.dim() == 4:
        return mask
    return mask[:, None, None, :] if mask_type == 1 else mask if mask.dim() == 2 else mask[:, None]


@kernel("_transformer_encoder_layer_fwd")
def transformer_encoder_layer_fwd(
    src: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    proj_weight: Tensor,
    proj_bias: Tensor,
    use_gelu: bool,
    norm_first: bool,
    eps: float,
    norm_weight_1: Tensor,
    norm_bias_1: Tensor,
    norm_weight_2: Tensor,
    norm_bias_2: Tensor,
    ffn_weight_1: Tensor,
    ffn_bias_1: Tensor,
    ffn_weight_2: Tensor,
    ffn_bias_2: Tensor,
    mask: Tensor | None = None,
    mask_type: int | None = None,
) -> Tensor:
    """Compute ``nn.TransformerEncoderLayer`` in inference."""
    not_padding = _mask_of(src)
    if not_padding is not None:
        mask, mask_type = ~not_padding, 1

    def attend(x: Tensor) -> Tensor:
        projections = (qkv_weight, qkv_bias, proj_weight, proj_bias)
        return native_multi_head_attention(x, x, x, embed_dim, num_heads, *projections, mask, False, True, mask_type)[0]

    def feed_forward(x: Tensor) -> Tensor:
        hidden = F.linear(x, ffn_weight_1, ffn_bias_1)
        return F.linear(F.gelu(hidden) if use_gelu else F.relu(hidden), ffn_weight_2, ffn_bias_2)

    def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, (embed_dim,), weight, bias, eps)

    if norm_first:
        src = src + attend(norm(src, norm_weight_1, norm_bias_1))
        out = src + feed_forward(norm(src, norm_weight_2, norm_bias_2))
    else:
        src = norm(src + attend(src), norm_weight_1, norm_bias_1)
        out = norm(src + feed_forward(src), norm_weight_2, norm_bias_2)
    return out if not_padding is None else _with_mask(out, not_padding)


FUSED: dict[object, object] = {
    aten._native_multi_head_attention.default: native_multi_head_attention,
    aten._transformer_encoder_layer_fwd.default: transformer_encoder_layer_fwd,
}
"""Ops of the inference paths of modules to what they are made of, for torch's tracers."""


# The inference path of ``nn.TransformerEncoder`` takes the padding out of a batch: it makes a nested tensor of it, and
# a padded one, with zeros, of the last layer's result.  Here the batch stays as it is and has its mask with it.


@kernel("_nested_tensor_from_mask_left_aligned")
def nested_tensor_from_mask_left_aligned(tensor: Tensor, mask: Tensor) -> bool:
    """Return True, without a read; of which kind the mask is counts in `to_padded_tensor`."""
    return True


@kernel("_nested_tensor_from_mask")
def nested_tensor_from_mask(tensor: Tensor, mask: Tensor, mask_check: bool = True) -> Tensor:
    """Return the batch, with the mask of what is no padding."""
    return _with_mask(tensor.clone(), mask)


@kernel("to_padded_tensor")
def to_padded_tensor(tensor: Tensor, padding: float, output_size: Sequence[int] | None = None) -> Tensor:
    """Return the batch with its padding filled, where that was at the end of each row."""
    mask = _mask_of(tensor)
    if mask is None:
        raise UnsupportedOpError(
            "a layer of nn.TransformerEncoder did not take its inference path, without which padding is not known",
            fix="make the module with enable_nested_tensor=False",
        )
    at_the_end = (mask[:, :-1] | ~mask[:, 1:]).all()
    return tensor.masked_fill((at_the_end & ~mask)[..., None], padding)


@kernel("_nested_tensor_from_tensor_list")
def nested_tensor_from_tensor_list(tensors: Sequence[Tensor], *options: object, **others: object) -> Tensor:
    """Refuse the strided layout, which is C++ for CPUs and CUDA."""
    raise UnsupportedOpError(
        "nested tensors of the strided layout are not on this device", fix="give torch.nested layout=torch.jagged"
    )


def _with_mask(tensor: Tensor, mask: Tensor) -> Tensor:
    tensor.__dict__["_mask"] = mask
    return tensor


def _mask_of(tensor: Tensor) -> Tensor | None:
    return tensor.__dict__.get("_mask")


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``F.scaled_dot_product_attention`` as one node with one gradient node, where the rule knows the case.

    Torch's C++ chooses between forms of attention by a table that a backend in Python cannot reach.
    """
    options = {"scale": scale, "enable_gqa": enable_gqa}
    if not _is_one_node(query, key, value, attn_mask, enable_gqa) or (is_causal and attn_mask is not None):
        decomposed: Tensor = aten.scaled_dot_product_attention.default.decompose(
            query, key, value, attn_mask, dropout_p, is_causal, **options
        )
        return decomposed
    if attn_mask is not None:
        scores = (*query.shape[:3], key.shape[2])
        if attn_mask.dim() != 4 or any(n not in (1, size) for n, size in zip(attn_mask.shape, scores, strict=True)):
            attn_mask = attn_mask.expand(scores)
    result: Tensor = _ATTENTION.overload(query, key, value, attn_mask, dropout_p, is_causal, scale=scale)[0]
    return result


def _is_one_node(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, enable_gqa: bool) -> bool:
    if not (is_device_tensor(query) and is_device_tensor(key) and is_device_tensor(value)):
        return False
    q, k, v, dtype = query.shape, key.shape, value.shape, query.dtype
    if not len(q) == len(k) == len(v) == 4 or 0 in q or 0 in k or 0 in v or not dtype.is_floating_point:
        return False
    if mask is not None and (mask.dim() > 4 or mask.dtype not in (torch.bool, dtype)):
        return False
    if not dtype == key.dtype == value.dtype or not q[0] == k[0] == v[0] or q[3] != k[3] or k[:3] != v[:3]:
        return False
    return bool(q[1] % k[1] == 0 if enable_gqa else q[1] == k[1])


_ATTENTION = op_of(aten._scaled_dot_product_fused_attention_overrideable.default)


_record_attention = generated.functional(_ATTENTION, functional(_ATTENTION.overload), made=(0, 1, 6, 7))


@kernel("_scaled_dot_product_fused_attention_overrideable")
def fused_attention(query: Tensor, key: Tensor, value: Tensor, *args: object, **kwargs: object) -> tuple[object, ...]:
    """Record attention; torch wants the lengths among the results as Python numbers.

    Several query heads may share a key head, and a mask of booleans says which keys a row sees.
    """
    if type(query) is not LazyTensor and on_other_device((query, key, value), {}):
        found: tuple[object, ...] = call_meta(_ATTENTION.overload, (query, key, value, *args), kwargs)
        return found
    result, sums, _, _, _, _, seed, offset, _ = _record_attention(query, key, value, *args, **kwargs)
    return result, sums, None, None, query.shape[2], key.shape[2], seed, offset, None


@kernel("rrelu_with_noise")
def rrelu_with_noise(x: Tensor, noise: Tensor, *args: object, **kwargs: object) -> Tensor:
    """Its schema returns the result alone, and it writes the slopes to ``noise``."""
    if on_other_device((x, noise), {}):
        found: Tensor = call_meta(aten.rrelu_with_noise.default, (x, noise, *args), kwargs)
        return found
    out: Tensor
    out, slopes = aten.rrelu_with_noise_functional.default(x, noise, *args, **kwargs)
    noise.copy_(slopes)
    return out


def tensor_split(x: Tensor, sections: Tensor, dim: int = 0) -> object:
    """``torch.tensor_split`` with its sections in a tensor, which torch wants on the CPU: it reads them."""
    if sections.dtype != torch.int64:
        kind = str(torch.empty(0, dtype=sections.dtype).type()).removeprefix("torch.").removesuffix("Tensor")
        raise RuntimeError(f"tensor_split expected tensor_indices_or_sections to have dtype of long, but got {kind}")
    return aten.tensor_split.tensor_indices_or_sections.decompose(x, sections.cpu(), dim)


_is_traced: Callable[[], bool] = torch._C._is_tracing


def convolution(recorded: Callable[..., object]) -> Callable[..., object]:
    """Return the kernel of a convolution.

    ``torch.jit.trace`` looks for ``_convolution``, which torch composes it of on other devices, and takes the result of
    anything else for a constant.
    """

    def kernel(*args: object) -> object:
        if _is_traced():
            found: object = aten._convolution.default(*args, False, False, False, False)
            return found
        return recorded(*args)

    return kernel
