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
from lazytpu.quantization.numbers import along, largest, scale_for, top


def rounded(x: torch.Tensor, amax: torch.Tensor, bits: int) -> torch.Tensor:
    """``x`` rounded as integers of that many bits would be, with the gradient of a clamp to ``amax``."""
    scale = scale_for(amax, bits).to(x.dtype)
    within = torch.minimum(torch.maximum(x, -amax.to(x.dtype)), amax.to(x.dtype))
    limit = top(bits)
    return within + ((within.detach() / scale).round().clamp(-limit, limit) * scale - within.detach())


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
        """The input and the weight, rounded."""
        if self.training:
            with torch.no_grad():
                now = largest(x).to(self.amax.dtype)
                moved = self.amax * self.momentum + now * (1 - self.momentum)
                self.amax.copy_(torch.where(self.amax == 0, now, moved))
        amax = largest(self.weight, 0 if self.per_row else None)
        return rounded(x, self.amax, self.bits), rounded(self.weight, along(amax, 0, self.weight.dim()), self.bits)


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
        """The float convolution with this module's weight."""
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
