"""An LSTM as a loop over products that may be quantized each in its way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from lazytpu.quantization.modules import QuantizedLinear

Make = Callable[[nn.Linear, int, str], nn.Module]
"""From a product (a Linear), its layer, and ``ih`` (of the input) or ``hh`` (of the state) to what takes its place."""


class QuantizedLSTM(nn.Module):
    """``nn.LSTM`` whose products are quantized: the inputs of all times in one, the state in one for each time.

    Args:
        source: the float module.
        bits: 8, or 16.
        make: what becomes of one of its products, instead of integers with scales found anew in each call.

    Attributes:
        cells: for each layer and direction the product with the input and that with the state.
    """

    def __init__(self, source: nn.LSTM, bits: int = 8, make: Make | None = None) -> None:
        super().__init__()
        if source.proj_size:
            raise ValueError("an LSTM with proj_size cannot be quantized")
        make = make or (lambda linear, layer, part: QuantizedLinear(linear, None, bits))
        self.hidden_size, self.num_layers, self.dropout = source.hidden_size, source.num_layers, source.dropout
        self.batch_first, self.directions = source.batch_first, 2 if source.bidirectional else 1
        self.cells = nn.ModuleList()
        for layer in range(self.num_layers):
            for direction in range(self.directions):
                suffix = f"l{layer}{'_reverse' if direction else ''}"
                self.cells.append(nn.ModuleList(make(_product(source, p, suffix), layer, p) for p in ("ih", "hh")))

    def forward(self, x: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor] | None = None) -> Any:
        """As ``nn.LSTM`` for a tensor [time, batch, features] (or batch first, or without batch)."""
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"a quantized LSTM takes a tensor, not a {type(x).__name__}: pad the sequences")
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


def _product(source: nn.LSTM, part: str, suffix: str) -> nn.Linear:
    """Return one of the two products of an LSTM's cell, with the LSTM's own parameters."""
    weight = getattr(source, f"weight_{part}_{suffix}")
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=source.bias, device="meta")
    linear.weight = weight
    if source.bias:
        linear.bias = getattr(source, f"bias_{part}_{suffix}")
    return linear
