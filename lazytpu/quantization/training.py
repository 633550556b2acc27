"""Modules that round while they train, so that a network gets used to it.

Weights and inputs are rounded as the quantized module will; gradients pass the rounding as if it were not there
(the straight-through estimator of Bengio, Leonard and Courville, arXiv:1308.3432), and stop where an input is beyond
the range.  The range of the inputs is a moving average of the largest magnitude, kept on the device: nothing is read.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from lazytpu.quantization.modules import Conv
from lazytpu.quantization.numbers import along, at_least_float32, largest, scale_for, top


def rounded(x: torch.Tensor, amax: torch.Tensor, bits: int) -> torch.Tensor:
    """``x`` rounded as integers of that many bits would be, with the gradient of a clamp to ``amax``."""
    wide = at_least_float32(x)
    amax = amax.to(wide.dtype)
    scale, limit = scale_for(amax, bits).to(wide.dtype), top(bits)
    within = torch.minimum(torch.maximum(wide, -amax), amax)
    return (within + ((within.detach() / scale).round().clamp(-limit, limit) * scale - within.detach())).to(x.dtype)


class _Rounding(nn.Module):
    """What the two modules below share.

    Attributes:
        amax: the range of the inputs, float32 []; zero before the first batch.
        momentum: how much of the old range stays at each batch in training.
    """

    amax: torch.Tensor
    weight: nn.Parameter
    bits: int
    per_row: bool
    momentum: float

    def _begin(self, bits: int, per_row: bool, momentum: float) -> None:
        self.bits, self.per_row, self.momentum = bits, per_row, momentum
        self.register_buffer("amax", torch.zeros((), device=self.weight.device))

    def round_both(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the input and the weight, rounded."""
        seen = self.amax
        if self.training:
            with torch.no_grad():
                now = largest(x).to(seen.dtype)
                moved = seen * self.momentum + now * (1 - self.momentum)
                seen = torch.where(seen == 0, now, moved)  # kept for backward: the next call changes the buffer
                self.amax.copy_(seen)
        amax = largest(self.weight, 0 if self.per_row else None)
        return rounded(x, seen, self.bits), rounded(self.weight, along(amax, 0, self.weight.dim()), self.bits)


class RoundedLinear(_Rounding, nn.Linear):
    """``nn.Linear`` that rounds its input and weight."""

    weight: nn.Parameter

    def __init__(self, source: nn.Linear, bits: int = 8, per_row: bool = True, momentum: float = 0.9) -> None:
        nn.Linear.__init__(self, source.in_features, source.out_features, source.bias is not None, device="meta")
        self.weight, self.bias = cast("nn.Parameter", source.weight), source.bias
        self._begin(bits, per_row, momentum)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(*self.round_both(x), self.bias)


class RoundedConv(_Rounding):
    """A convolution that rounds its input and weight."""

    bias: nn.Parameter | None

    def __init__(self, source: Conv, bits: int = 8, per_row: bool = True, momentum: float = 0.9) -> None:
        super().__init__()
        self.weight = cast("nn.Parameter", source.weight)
        self.register_parameter("bias", cast("nn.Parameter | None", source.bias))
        self.settings: dict[str, Any] = {
            name: getattr(source, name)
            for name in ("stride", "padding", "dilation", "groups", "padding_mode", "kernel_size")
        }
        self.source_type = type(source)
        self._pads = source._reversed_padding_repeated_twice
        self._begin(bits, per_row, momentum)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, weight = self.round_both(x)
        s = self.settings
        conv = {nn.Conv1d: F.conv1d, nn.Conv2d: F.conv2d, nn.Conv3d: F.conv3d}[self.source_type]
        padding = s["padding"]
        if s["padding_mode"] != "zeros":
            x, padding = F.pad(x, self._pads, mode=s["padding_mode"]), 0
        return conv(x, weight, self.bias, s["stride"], padding, s["dilation"], s["groups"])

    def as_conv(self) -> Conv:
        """Return the float convolution with this module's weight."""
        s = self.settings
        conv = self.source_type(
            self.weight.shape[1] * s["groups"],
            self.weight.shape[0],
            s["kernel_size"],
            s["stride"],
            s["padding"],
            s["dilation"],
            s["groups"],
            self.bias is not None,
            s["padding_mode"],
            device="meta",
        )
        conv.weight, conv.bias = self.weight, self.bias
        return conv


class RoundedEmbedding(nn.Embedding):
    """``nn.Embedding`` that rounds the rows it gives."""

    def __init__(self, source: nn.Embedding, bits: int = 8, per_row: bool = True) -> None:
        if source.max_norm is not None:
            raise ValueError("an embedding with max_norm cannot be quantized: each call changes its table")
        super().__init__(
            source.num_embeddings,
            source.embedding_dim,
            source.padding_idx,
            scale_grad_by_freq=source.scale_grad_by_freq,
            sparse=source.sparse,
            device="meta",
        )
        self.weight, self.bits, self.per_row = source.weight, bits, per_row

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = super().forward(ids)
        amax = rows.detach().abs().amax(-1, keepdim=True) if self.per_row else largest(self.weight)
        return rounded(rows, amax, self.bits)
