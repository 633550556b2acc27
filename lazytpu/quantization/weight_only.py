"""Modules with weights of int8 or int4 and products of floats.

What is saved are the bytes of the weight, in memory and on the way to the multipliers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from lazytpu.quantization.modules import Conv, KeepsDtype, KeepsScales
from lazytpu.quantization.numbers import group_for, pack_int4, scale_for, to_integers, unpack_int4


class _Packed(KeepsScales):
    """A weight [rows, ...] in integers: int8 with a scale for each row, or int4 with one for each group of a row.

    Attributes:
        weight: int8 [rows, size], or uint8 [rows, size / 2], two int4 in each.
        scale: float32 [rows, size / group].
        bits: 8, or 4; 8 also where 4 was asked for and no group fits the size of a row.
        group: how many weights have one scale.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, bits: int, group: int) -> None:
        super().__init__()
        if bits not in (4, 8):
            raise ValueError(f"bits must be 4 or 8, not {bits}")
        if group % 2 or group < 2:
            raise ValueError(f"group must be even, not {group}")
        self.shape = tuple(weight.shape)
        rows = weight.detach().flatten(1)
        fits = group_for(rows.shape[1], group) if bits == 4 else 0
        self.bits, self.group = (4, fits) if fits else (8, rows.shape[1])
        grouped = rows.unflatten(1, (-1, self.group))
        scale = scale_for(grouped.abs().amax(-1), self.bits)
        q = to_integers(grouped, scale[..., None], 8).flatten(1)  # of int4, from -7 to 7 by the scale
        self.register_buffer("weight", pack_int4(q) if self.bits == 4 else q)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if bias is None else bias.detach().clone())

    def floats(self, dtype: torch.dtype, rows: torch.Tensor | None = None) -> torch.Tensor:
        """Return the weight, or some of its rows, flat: [..., size]."""
        packed, scale = (self.weight, self.scale) if rows is None else (self.weight[rows], self.scale[rows])
        q = unpack_int4(packed) if self.bits == 4 else packed
        grouped: torch.Tensor = q.unflatten(-1, (-1, self.group)).to(dtype)
        return (grouped * scale[..., None].to(dtype)).flatten(-2)

    def extra_repr(self) -> str:
        return f"{'x'.join(map(str, self.shape))}, int{self.bits} weight"


class WeightOnlyLinear(_Packed):
    """``nn.Linear`` whose weight is int8 or int4."""

    def __init__(self, source: nn.Linear, bits: int = 8, group: int = 32) -> None:
        super().__init__(source.weight, source.bias, bits, group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.floats(x.dtype), self.bias)


class WeightOnlyConv(_Packed):
    """``nn.Conv1d`` to ``nn.Conv3d`` whose weight is int8 or int4."""

    def __init__(self, source: Conv, bits: int = 8, group: int = 32) -> None:
        super().__init__(source.weight, source.bias, bits, group)
        self.stride, self.padding, self.dilation = source.stride, source.padding, source.dilation
        self.groups, self.padding_mode = source.groups, source.padding_mode
        self._pads = source._reversed_padding_repeated_twice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        conv: Callable[..., torch.Tensor] = (F.conv1d, F.conv2d, F.conv3d)[len(self.shape) - 3]
        padding = self.padding
        if self.padding_mode != "zeros":
            x, padding = F.pad(x, self._pads, mode=self.padding_mode), 0  # type: ignore[assignment]
        weight = self.floats(x.dtype).reshape(self.shape)
        return conv(x, weight, self.bias, self.stride, padding, self.dilation, self.groups)


class WeightOnlyEmbedding(KeepsDtype, _Packed):
    """``nn.Embedding`` whose table is int4, or int8; only the rows that are asked for are unpacked."""

    def __init__(self, source: nn.Embedding, bits: int = 8, group: int = 32) -> None:
        if source.max_norm is not None:
            raise ValueError("an embedding with max_norm cannot be quantized: each call changes its table")
        super().__init__(source.weight, None, bits, group)
        self.dtype = source.weight.dtype

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.floats(self.dtype, ids)
