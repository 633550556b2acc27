"""The cells of recurrent layers, LSTM, GRU and plain RNN: one step and its gradient, for any kind of arrays.

Torch sends ``nn.LSTMCell`` and ``nn.GRUCell`` of a device to ops of their own, which are steps of the same: `FUSED`.

`Arrays` says what is done with arrays: a lowering rule gives jax's, and torch's where a graph is interpreted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from lazytpu.ir.op_schema import Arg, OpOverload, aten

Array: TypeAlias = Arg
State: TypeAlias = tuple[Array, ...]
New: TypeAlias = tuple[State, tuple[Array, ...]]
"""A new state, and what is kept of the step."""
Step: TypeAlias = Callable[[State, Sequence[Array]], New]
Grads: TypeAlias = tuple[Array, Array, tuple[Array | None, ...]]
"""Gradients of the input gates, of the hidden gates, and of the state before, as far as the gates do not lead to it."""


class Arrays(Protocol):
    """What the loops do with arrays, which are of the type to compute in."""

    def product(self, x: Array, weight: Array) -> Array:
        """Return ``x @ weight``."""

    def outer(self, grad: Array, x: Array) -> Array:
        """Return ``grad.T @ x``, summed over all dimensions but the last."""

    def total(self, grad: Array) -> Array:
        """Return the sum over all dimensions but the last."""

    def loop(self, step: Step, state: State, xs: Sequence[Array], reverse: bool) -> tuple[State, Sequence[Array]]:
        """Return the last state, and what each step gives, stacked; ``reverse`` begins at the end of ``xs``."""

    def apart(self, cell: Callable[..., New], m: Arrays) -> Callable[..., New]:
        """Return ``partial(cell, m)`` as it is best called in a loop."""

    def sigmoid(self, x: Array) -> Array: ...
    def tanh(self, x: Array) -> Array: ...
    def relu(self, x: Array) -> Array: ...
    def split(self, x: Array, parts: int) -> Sequence[Array]: ...
    def concatenate(self, xs: Sequence[Array], axis: int) -> Array: ...
    def zeros_like(self, x: Array) -> Array: ...
    def where(self, mask: Array, x: Array | float, y: Array | float) -> Array: ...
    def take(self, x: Array, rows: Array) -> Array: ...
    def arange(self, n: int) -> Array: ...
    def cumsum(self, x: Array) -> Array: ...
    def count_up_to(self, ends: Array, places: Array) -> Array:
        """Return for each place how many of the ascending ``ends`` are not above it."""


@dataclass(frozen=True)
class Cell:
    """One kind of layer.

    Attributes:
        states: what the state is made of: an output, and for the LSTM a cell.
        gates: how many the rows of a weight are divided into.
        kept: how many arrays like the state are kept of a step for its gradient.
        forward: (arrays, input gates, hidden gates, state) to the new state and what is kept.
        backward: (arrays, gradients of the new state, what was kept, state before, state after) to gradients.
        shares_gates: input gates and hidden gates are added, so they have one gradient.
    """

    states: int
    gates: int
    kept: int
    forward: Callable[[Arrays, Array, Array, State], New]
    backward: Callable[[Arrays, State, Sequence[Array], State, State], Grads]
    shares_gates: bool = True


def _lstm(m: Arrays, of_input: Array, of_hidden: Array, state: State) -> New:
    i, f, g, o = m.split(of_input + of_hidden, 4)
    i, f, g, o = m.sigmoid(i), m.sigmoid(f), m.tanh(g), m.sigmoid(o)
    c = f * state[1] + i * g
    return (o * m.tanh(c), c), (i, f, g, o)


def _lstm_backward(m: Arrays, grads: State, kept: Sequence[Array], before: State, after: State) -> Grads:
    i, f, g, o = kept
    t = m.tanh(after[1])
    of_c = grads[1] + grads[0] * o * (1 - t * t)
    parts = of_c * g * i * (1 - i), of_c * before[1] * f * (1 - f), of_c * i * (1 - g * g), grads[0] * t * o * (1 - o)
    gates = m.concatenate(parts, -1)
    return gates, gates, (None, of_c * f)


def _gru(m: Arrays, of_input: Array, of_hidden: Array, state: State) -> New:
    (ir, iz, n), (hr, hz, hn) = m.split(of_input, 3), m.split(of_hidden, 3)
    r, z = m.sigmoid(ir + hr), m.sigmoid(iz + hz)
    n = m.tanh(n + r * hn)
    return (n + z * (state[0] - n),), (r, z, n, hn)


def _gru_backward(m: Arrays, grads: State, kept: Sequence[Array], before: State, after: State) -> Grads:
    r, z, n, hn = kept
    of_n = grads[0] * (1 - z) * (1 - n * n)
    of_z = grads[0] * (before[0] - n) * z * (1 - z)
    of_r = of_n * hn * r * (1 - r)
    return m.concatenate((of_r, of_z, of_n), -1), m.concatenate((of_r, of_z, of_n * r), -1), (grads[0] * z,)


def _rnn(function: str) -> Callable[[Arrays, Array, Array, State], New]:
    def forward(m: Arrays, of_input: Array, of_hidden: Array, state: State) -> New:
        return (getattr(m, function)(of_input + of_hidden),), ()

    return forward


def _tanh_backward(m: Arrays, grads: State, kept: Sequence[Array], before: State, after: State) -> Grads:
    gates = grads[0] * (1 - after[0] * after[0])
    return gates, gates, (None,)


def _relu_backward(m: Arrays, grads: State, kept: Sequence[Array], before: State, after: State) -> Grads:
    gates = m.where(after[0] <= 0, 0.0, grads[0])  # the gradient at NaN goes through, as torch's does
    return gates, gates, (None,)


CELLS = {
    "lstm": Cell(2, 4, 4, _lstm, _lstm_backward),
    "gru": Cell(1, 3, 4, _gru, _gru_backward, shares_gates=False),
    "rnn_tanh": Cell(1, 1, 0, _rnn("tanh"), _tanh_backward),
    "rnn_relu": Cell(1, 1, 0, _rnn("relu"), _relu_backward),
}


def _plus(x: Array, bias: Array | None) -> Array:
    return x if bias is None else x + bias


def _fused_lstm(
    m: Arrays, of_input: Array, of_hidden: Array, cx: Array, input_bias: Array = None, hidden_bias: Array = None
) -> State:
    (hy, cy), kept = _lstm(m, _plus(of_input, input_bias), _plus(of_hidden, hidden_bias), (None, cx))
    return hy, cy, m.concatenate(kept, -1)


def _fused_lstm_backward(
    m: Arrays, of_hy: Array | None, of_cy: Array | None, cx: Array, cy: Array, kept: Array, has_bias: bool
) -> State:
    grads = tuple([m.zeros_like(cx) if x is None else x for x in (of_hy, of_cy)])
    gates, _, (_, of_cx) = _lstm_backward(m, grads, m.split(kept, 4), (None, cx), (None, cy))
    return gates, of_cx, m.total(gates) if has_bias else None


def _fused_gru(
    m: Arrays, of_input: Array, of_hidden: Array, hx: Array, input_bias: Array = None, hidden_bias: Array = None
) -> State:
    (hy,), (r, z, n, hn) = _gru(m, _plus(of_input, input_bias), _plus(of_hidden, hidden_bias), (hx,))
    return hy, m.concatenate((r, z, n, hx, hn), -1)


def _fused_gru_backward(m: Arrays, of_hy: Array, kept: Array, has_bias: bool) -> State:
    r, z, n, hx, hn = m.split(kept, 5)
    of_input, of_hidden, (of_hx,) = _gru_backward(m, (of_hy,), (r, z, n, hn), (hx,), ())
    return of_input, of_hidden, of_hx, *[m.total(x) if has_bias else None for x in (of_input, of_hidden)]


FUSED: dict[OpOverload, Callable[..., State]] = {
    aten._thnn_fused_lstm_cell.default: _fused_lstm,
    aten._thnn_fused_lstm_cell_backward_impl.default: _fused_lstm_backward,
    aten._thnn_fused_gru_cell.default: _fused_gru,
    aten._thnn_fused_gru_cell_backward.default: _fused_gru_backward,
}
"""Op to a function of `Arrays` and of its arguments, in the type to compute in; None where torch has no result."""
