"""Recurrent layers and cells with torch's CPU kernels, where a graph is interpreted.

The ops are those of `rules/recurrent_layers`.

Without a gradient they are torch's own ops, in the type to compute in.  What the gradient needs torch keeps to itself,
so with one the loop is Python's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from lazytpu.dtypes import HALVES
from lazytpu.ir.op_schema import Arg
from lazytpu.lowering.rules.recurrent_layers import BACKWARD, FORWARD
from lazytpu.lowering.support import recurrence
from lazytpu.lowering.support.recurrence import Stack
from lazytpu.lowering.support.recurrent_cells import FUSED, Arrays, New, State, Step

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


def _fused(cell: Callable[..., _Results], *args: Arg) -> _Results:
    return cell(_TorchArrays(), *[_wide(x) if isinstance(x, Tensor) else x for x in args])


KERNELS: dict[torch._ops.OpOverload, Callable[..., _Results]] = {
    **{op: partial(_layers, kind) for kind, op in FORWARD.items()},
    **{op: partial(_layers_backward, kind) for kind, op in BACKWARD.items()},
    **{op: partial(_fused, cell) for op, cell in FUSED.items()},
}
"""Op to a function of its arguments that returns its results."""
