"""Modules that hold integers in place of float weights."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lazytpu.quantization.numbers import (
    along,
    integer_conv,
    integer_linear,
    largest,
    pack_int4,
    scale_for,
    to_integers,
    unpack_int4,
)

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d


class _Integers(nn.Module):
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
        """The input in integers and its scale."""
        scale = scale_for(largest(x), self.bits) if self.input_scale is None else self.input_scale
        return to_integers(x, scale, self.bits), scale

    def to_floats(self, sums: torch.Tensor, scale: torch.Tensor, x: torch.Tensor, dim: int) -> torch.Tensor:
        """What the integer sums stand for, in the dtype of the input, the bias added along ``dim``."""
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
            raise ValueError(f"padding_mode is 'zeros' in a quantized convolution, not {source.padding_mode!r}")
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
    """How many zeros go before and after, for each dimension."""
    if source.padding == "valid":
        return [(0, 0)] * len(source.stride)
    if source.padding == "same":
        whole = [d * (k - 1) for d, k in zip(source.dilation, source.kernel_size, strict=True)]
        return [(n // 2, n - n // 2) for n in whole]
    return [(int(p), int(p)) for p in source.padding]


class QuantizedEmbedding(nn.Module):
    """``nn.Embedding`` with an int8 table and a scale for each row."""

    weight: torch.Tensor
    scale: torch.Tensor

    def __init__(self, source: nn.Embedding) -> None:
        super().__init__()
        if source.max_norm is not None:
            raise ValueError("max_norm changes the table in each call, which is not quantized")
        scale = scale_for(largest(source.weight, 0), 8)
        self.register_buffer("weight", to_integers(source.weight.detach(), scale[:, None], 8))
        self.register_buffer("scale", scale)
        self.dtype = source.weight.dtype

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return (self.weight[ids].to(torch.float32) * self.scale[ids][..., None]).to(self.dtype)

    def extra_repr(self) -> str:
        return f"{'x'.join(map(str, self.weight.shape))}, int8"


class WeightOnlyLinear(nn.Module):
    """``nn.Linear`` whose weight is int8, a scale for each row, or int4, a scale for each group of a row.

    The product is of floats; what is saved are the bytes of the weight, in memory and on the way to the multipliers.
    """

    weight: torch.Tensor
    scale: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, source: nn.Linear, bits: int = 8, group: int = 32) -> None:
        super().__init__()
        if bits not in (4, 8):
            raise ValueError(f"bits is 4 or 8, not {bits}")
        if bits == 4 and (source.in_features % group or group % 2):
            raise ValueError(f"group is even and divides in_features: {group} does not fit {source.in_features}")
        self.bits, self.group = bits, group if bits == 4 else source.in_features
        weight = source.weight.detach().reshape(source.out_features, -1, self.group)
        scale = scale_for(weight.abs().amax(-1), bits)
        q = (weight / scale[..., None]).round().to(torch.int8).reshape(source.out_features, -1)
        self.register_buffer("weight", pack_int4(q) if bits == 4 else q)
        self.register_buffer("scale", scale)
        self.register_buffer("bias", None if source.bias is None else source.bias.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = unpack_int4(self.weight) if self.bits == 4 else self.weight
        rows = q.reshape(q.shape[0], -1, self.group).to(x.dtype) * self.scale[..., None].to(x.dtype)
        return F.linear(x, rows.reshape(q.shape), self.bias)

    def extra_repr(self) -> str:
        return f"{'x'.join(map(str, self.weight.shape))}, int{self.bits} weight"


class QuantizedLSTM(nn.Module):
    """``nn.LSTM`` with integer products: the inputs of all times in one, the state in one for each time."""

    def __init__(self, source: nn.LSTM, bits: int = 8) -> None:
        super().__init__()
        if source.proj_size:
            raise ValueError("proj_size is not quantized")
        self.hidden_size, self.num_layers, self.dropout = source.hidden_size, source.num_layers, source.dropout
        self.batch_first, self.directions = source.batch_first, 2 if source.bidirectional else 1
        self.cells = nn.ModuleList()
        for layer in range(self.num_layers):
            for direction in range(self.directions):
                suffix = f"l{layer}{'_reverse' if direction else ''}"
                self.cells.append(nn.ModuleList(_product(source, part, suffix, bits) for part in ("ih", "hh")))

    def forward(self, x: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor] | None = None) -> Any:
        """As ``nn.LSTM`` for a tensor [time, batch, features] (or batch first, or without batch)."""
        lone = x.dim() == 2
        if lone:
            x = x.unsqueeze(1)
            state = None if state is None else (state[0].unsqueeze(1), state[1].unsqueeze(1))
        elif self.batch_first:
            x = x.transpose(0, 1)
        if state is None:
            zeros = x.new_zeros((len(self.cells), x.shape[1], self.hidden_size))
            state = zeros, zeros
        hidden, memory = [], []
        for layer in range(self.num_layers):
            outs = []
            for direction in range(self.directions):
                at = layer * self.directions + direction
                out, h, c = self._run(self.cells[at], x.flip(0) if direction else x, state[0][at], state[1][at])
                outs.append(out.flip(0) if direction else out)
                hidden.append(h)
                memory.append(c)
            x = torch.cat(outs, -1)
            if self.dropout and self.training and layer + 1 < self.num_layers:
                x = F.dropout(x, self.dropout)
        h, c = torch.stack(hidden), torch.stack(memory)
        if lone:
            return x.squeeze(1), (h.squeeze(1), c.squeeze(1))
        return (x.transpose(0, 1) if self.batch_first else x), (h, c)

    def _run(
        self, cell: Any, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        from_input, from_state = cell
        outs = []
        for gates in from_input(x).unbind(0):
            i, f, g, o = (gates + from_state(h)).chunk(4, -1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            outs.append(h)
        return torch.stack(outs), h, c


def _product(source: nn.LSTM, part: str, suffix: str, bits: int) -> QuantizedLinear:
    """One of the two products of an LSTM's cell."""
    weight = getattr(source, f"weight_{part}_{suffix}").detach()
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=source.bias, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if source.bias:
        linear.bias = nn.Parameter(getattr(source, f"bias_{part}_{suffix}").detach(), requires_grad=False)
    return QuantizedLinear(linear, None, bits)
