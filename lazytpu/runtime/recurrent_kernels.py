"""Recurrent layers and cells with torch's CPU kernels, where a graph is interpreted.

The ops are those of `rules/recurrent_layers` and `rules/recurrent`.

Without a gradient they are torch's own ops, in the type to compute in.  What the gradient needs torch keeps to itself,
so with one the loop is Python's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from lazytpu.dtypes import HALVES
from lazytpu.lowering.rules.recurrent_layers import BACKWARD, FORWARD
from lazytpu.lowering.support import recurrence
from lazytpu.lowering.support.recurrence import Stack
from lazytpu.lowering.support.recurrent_cells import Arrays, New, State, Step

aten = torch.ops.aten
_Results = Sequence[Tensor | None]


class _TorchArrays:
    """What the loops do with tensors."""

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight

    def outer(self, grad: Tensor, x: Tensor) -> Tensor:
        return grad.flatten(0, -2).mT @ x.flatten(0, -2)

    def total(self, grad: Tensor) -> Tensor:
        return grad.flatten(0, -2).sum(0)

    def loop(self, step: Step, state: State, xs: Sequence[Tensor], reverse: bool) -> tuple[State, Sequence[Tensor]]:
        made = []
        slices = list(zip(*[x.unbind() for x in xs], strict=True))
        for own in reversed(slices) if reverse else slices:
            state, ys = step(state, own)
            made.append(ys)
        return state, [torch.stack(ys) for ys in zip(*(made[::-1] if reverse else made), strict=True)]

    def apart(self, cell: Callable[..., New], m: Arrays) -> Callable[..., New]:
        return partial(cell, m)

    def split(self, x: Tensor, parts: int) -> Sequence[Tensor]:
        return x.chunk(parts, -1)

    def where(self, mask: Tensor, x: Tensor | float, y: Tensor | float) -> Tensor:
        return torch.where(mask, x, y)

    def take(self, x: Tensor, rows: Tensor) -> Tensor:
        return x[rows]

    def cumsum(self, x: Tensor) -> Tensor:
        return x.cumsum(0)

    def count_up_to(self, ends: Tensor, places: Tensor) -> Tensor:
        return torch.searchsorted(ends, places, right=True)

    def concatenate(self, xs: Sequence[Tensor], axis: int) -> Tensor:
        return torch.cat(list(xs), axis)

    def sigmoid(self, x: Tensor) -> Tensor:
        return x.sigmoid()

    def tanh(self, x: Tensor) -> Tensor:
        return x.tanh()

    def relu(self, x: Tensor) -> Tensor:
        return x.relu()

    def zeros_like(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    def arange(self, n: int) -> Tensor:
        return torch.arange(n, device="cpu")


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in HALVES else x


def _layers(
    kind: str,
    x: Tensor,
    batch_sizes: Tensor | None,
    states: Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    bidirectional: bool,
    keep: bool = False,
) -> _Results:
    dtype = x.dtype
    x, *rest = map(_wide, (x, *states, *params))
    states, params = rest[: len(states)], rest[len(states) :]
    stack = Stack.of(kind, params, has_biases, num_layers, bidirectional)
    if keep or stack.projected:  # torch warns of how slow its own is with a projection
        y, last, kept = recurrence.forward(_TorchArrays(), stack, x, batch_sizes, states, params)
        results = [y, *map(torch.stack, last), *kept]
    else:
        hx = states if kind == "lstm" else states[0]
        settings = has_biases, num_layers, 0.0, False, bidirectional
        packet = getattr(aten, kind)
        if batch_sizes is None:
            results = packet.input(x, hx, params, *settings, False)
        else:
            results = packet.data(x, batch_sizes, hx, params, *settings)
    return [r.to(dtype) for r in results]


def _layers_backward(
    kind: str,
    grads: Sequence[Tensor | None],
    x: Tensor,
    batch_sizes: Tensor | None,
    states: Sequence[Tensor],
    params: Sequence[Tensor],
    kept: Sequence[Tensor],
    has_biases: bool,
    num_layers: int,
    bidirectional: bool,
) -> _Results:
    stack = Stack.of(kind, params, has_biases, num_layers, bidirectional)
    of_x, of_states, of_params = recurrence.backward(
        _TorchArrays(),
        stack,
        [None if g is None else _wide(g) for g in grads],
        _wide(x),
        batch_sizes,
        [_wide(s) for s in states],
        [_wide(p) for p in params],
        [_wide(k) for k in kept],
    )
    return [t.to(x.dtype) for t in (of_x, *map(torch.stack, of_states), *of_params)]


def _gates(x: Tensor, bias: Tensor | None, n: int) -> Sequence[Tensor]:
    x = _wide(x)
    return (x if bias is None else x + _wide(bias)).chunk(n, -1)


def _lstm_cell(
    of_input: Tensor, of_hidden: Tensor, cx: Tensor, input_bias: Tensor | None = None, hidden_bias: Tensor | None = None
) -> _Results:
    gates = zip(_gates(of_input, input_bias, 4), _gates(of_hidden, hidden_bias, 4), strict=True)
    i, f, g, o = (a + b for a, b in gates)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * _wide(cx) + i * g
    return [o * cy.tanh(), cy, torch.cat([i, f, g, o], -1)]


def _lstm_cell_backward(
    of_hy: Tensor | None, of_cy: Tensor | None, cx: Tensor, cy: Tensor, workspace: Tensor, has_bias: bool
) -> _Results:
    i, f, g, o = _gates(workspace, None, 4)
    cx, t = _wide(cx), _wide(cy).tanh()
    hidden, cell = (torch.zeros_like(cx) if x is None else _wide(x) for x in (of_hy, of_cy))
    of_c = cell + hidden * o * (1 - t * t)
    parts = [of_c * g * i * (1 - i), of_c * cx * f * (1 - f), of_c * i * (1 - g * g), hidden * t * o * (1 - o)]
    gates = torch.cat(parts, -1)
    return [gates, of_c * f, gates.sum(0) if has_bias else None]


def _gru_cell(
    of_input: Tensor, of_hidden: Tensor, hx: Tensor, input_bias: Tensor | None = None, hidden_bias: Tensor | None = None
) -> _Results:
    ir, iz, n = _gates(of_input, input_bias, 3)
    hr, hz, hn = _gates(of_hidden, hidden_bias, 3)
    r, z, h = (ir + hr).sigmoid(), (iz + hz).sigmoid(), _wide(hx)
    n = (n + r * hn).tanh()
    return [n + z * (h - n), torch.cat([r, z, n, h, hn], -1)]


def _gru_cell_backward(of_hy: Tensor, workspace: Tensor, has_bias: bool) -> _Results:
    r, z, n, h, hn = _gates(workspace, None, 5)
    grad = _wide(of_hy)
    of_n = grad * (1 - z) * (1 - n * n)
    of_z = grad * (h - n) * z * (1 - z)
    of_r = of_n * hn * r * (1 - r)
    of_input, of_hidden = torch.cat([of_r, of_z, of_n], -1), torch.cat([of_r, of_z, of_n * r], -1)
    return [of_input, of_hidden, grad * z, *[x.sum(0) if has_bias else None for x in (of_input, of_hidden)]]


KERNELS: dict[torch._ops.OpOverload, Callable[..., _Results]] = {
    **{op: partial(_layers, kind) for kind, op in FORWARD.items()},
    **{op: partial(_layers_backward, kind) for kind, op in BACKWARD.items()},
    aten._thnn_fused_gru_cell.default: _gru_cell,
    aten._thnn_fused_gru_cell_backward.default: _gru_cell_backward,
    aten._thnn_fused_lstm_cell.default: _lstm_cell,
    aten._thnn_fused_lstm_cell_backward_impl.default: _lstm_cell_backward,
}
"""Op to a function of its arguments that returns its results."""
