"""Modules that hold integers in place of float weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import torch
import torch.nn.functional as F
from torch import nn

from lazytpu.quantization.numbers import along, integer_conv, integer_linear, largest, scale_for, to_integers

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d


class KeepsScales(nn.Module):
    """A module whose scales stay float32 when it is cast: those of 16 bits are too small for float16."""

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        kept = {name: self._buffers.get(name) for name in ("scale", "input_scale")}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, scale in kept.items():
            moved = self._buffers.get(name)
            if scale is not None and moved is not None and moved.dtype != scale.dtype:
                self._buffers[name] = scale.to(moved.device)
        return self


class _Integers(KeepsScales):
    """A weight in integers, and what its inputs are rounded with.

    Attributes:
        weight: int8 or int16, of the shape of the float weight.
        scale: float32, [] or one for each row of the weight.
        input_scale: float32 [], or None where it is found anew in each call.
        bias: as the float module's, or None.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    input_scale: torch.Tensor | None
    bias: torch.Tensor | None

    def __init__(self, source: nn.Linear | Conv, input_scale: torch.Tensor | None, bits: int, per_row: bool) -> None:
        super().__init__()
        self.bits = bits
        weight = source.weight.detach()
        scale = scale_for(largest(weight, 0 if per_row else None), bits)
        self.register_buffer("weight", to_integers(weight, along(scale, 0, weight.dim()), bits))
        self.register_buffer("scale", scale)
        self.register_buffer("input_scale", input_scale)
        self.register_buffer("bias", None if source.bias is None else source.bias.detach().clone())

    def round_input(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the input in integers and its scale."""
        scale = scale_for(largest(x), self.bits) if self.input_scale is None else self.input_scale
        return to_integers(x, scale, self.bits), scale

    def to_floats(self, sums: torch.Tensor, scale: torch.Tensor, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Return what the integer sums stand for, in the dtype of the input, the bias added along ``dim``."""
        out = sums.to(torch.float32) * (scale * along(self.scale, dim, sums.dim()))
        if self.bias is not None:
            out = out + along(self.bias, dim, sums.dim())
        return out.to(x.dtype)

    def extra_repr(self) -> str:
        how = "dynamic" if self.input_scale is None else "static"
        return f"{'x'.join(map(str, self.weight.shape))}, int{self.bits}, {how}"


class QuantizedLinear(_Integers):
    """``nn.Linear`` with integer products: x [..., in] -> [..., out]."""

    def __init__(
        self, source: nn.Linear, input_scale: torch.Tensor | None = None, bits: int = 8, per_row: bool = True
    ) -> None:
        super().__init__(source, input_scale, bits, per_row)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, scale = self.round_input(x)
        return self.to_floats(integer_linear(q, self.weight), scale, x, q.dim() - 1)


class QuantizedConv(_Integers):
    """``nn.Conv1d`` to ``nn.Conv3d`` with integer products; zero padding only."""

    def __init__(
        self, source: Conv, input_scale: torch.Tensor | None = None, bits: int = 8, per_row: bool = True
    ) -> None:
        if source.padding_mode != "zeros":
            raise ValueError(f"padding_mode of a quantized convolution must be 'zeros', not {source.padding_mode!r}")
        super().__init__(source, input_scale, bits, per_row)
        self.stride, self.dilation, self.groups = list(source.stride), list(source.dilation), source.groups
        self.padding = _padding(source)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, scale = self.round_input(x)
        lone = q.dim() < self.weight.dim()
        if lone:
            q = q.unsqueeze(0)
        padding = [before for before, _ in self.padding]
        if any(before != after for before, after in self.padding):
            q, padding = F.pad(q, [n for pair in reversed(self.padding) for n in pair]), [0] * len(padding)
        sums = integer_conv(q, self.weight, self.stride, padding, self.dilation, self.groups)
        out = self.to_floats(sums, scale, x, 1)
        return out.squeeze(0) if lone else out


def _padding(source: Conv) -> list[tuple[int, int]]:
    """Return how many zeros go before and after, for each dimension."""
    if source.padding == "valid":
        return [(0, 0)] * len(source.stride)
    if source.padding == "same":
        whole = [d * (k - 1) for d, k in zip(source.dilation, source.kernel_size, strict=True)]
        return [(n // 2, n - n // 2) for n in whole]
    return [(int(p), int(p)) for p in source.padding]


class KeepsDtype(KeepsScales):
    """A table of integers with the dtype of its rows, which a cast changes as that of a table of floats."""

    weight: torch.Tensor
    dtype: torch.dtype

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self.weight.device)).dtype  # as of a float table
        return super()._apply(fn, recurse)


class QuantizedEmbedding(KeepsDtype):
    """``nn.Embedding`` with a table of int8 or int16 and a scale for each row, or one for all."""

    scale: torch.Tensor

    def __init__(self, source: nn.Embedding, bits: int = 8, per_row: bool = True) -> None:
        super().__init__()
        if source.max_norm is not None:
            raise ValueError("an embedding with max_norm cannot be quantized: each call changes its table")
        scale = scale_for(largest(source.weight, 0 if per_row else None), bits)
        self.register_buffer("weight", to_integers(source.weight.detach(), along(scale, 0, 2), bits))
        self.register_buffer("scale", scale)
        self.dtype = source.weight.dtype

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        scale = self.scale[ids][..., None] if self.scale.dim() else self.scale
        return (self.weight[ids].to(torch.float32) * scale).to(self.dtype)

    def extra_repr(self) -> str:
        return f"{'x'.join(map(str, self.weight.shape))}, {str(self.weight.dtype).removeprefix('torch.')}"
