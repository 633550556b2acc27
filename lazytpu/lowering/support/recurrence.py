"""Recurrent layers as loops over time, with their gradients; for any kind of arrays.

The products with what is known before the loop, the input of all times, stand before it, and those of the weights'
gradients behind it: each is one product of matrices.  In the loop there is one product a step, with the state.

A packed sequence has the rows of all times one after the other, sorted so that the longest sequence is first.  It is
spread over [time, batch] for the loop, in which the state of a sequence that has ended stays as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lazytpu.lowering.support.recurrent_cells import CELLS, Array, Arrays, Cell, New, State


@dataclass(frozen=True)
class Weights:
    """The parameters of one layer in one direction; gradients of them, too.  H is the width, P that of the output.

    Attributes:
        of_input: [gates * H, features].
        of_hidden: [gates * H, P].
        biases: two of [gates * H], or none.
        projection: [P, H], of an LSTM whose output is narrower than its cell.
    """

    of_input: Array
    of_hidden: Array
    biases: tuple[Array, ...]
    projection: Array | None

    @property
    def all(self) -> list[Array]:
        """In the order in which torch has them."""
        return [self.of_input, self.of_hidden, *self.biases, *([] if self.projection is None else [self.projection])]


@dataclass(frozen=True)
class Stack:
    """The layers of one op.

    Attributes:
        cell: their kind.
        layers: their number.
        directions: 1, or 2 where each layer has one that begins at the end.
        has_biases: whether there are biases.
        projected: whether there is a projection.
    """

    cell: Cell
    layers: int
    directions: int
    has_biases: bool
    projected: bool

    @classmethod
    def of(cls, kind: str, params: Sequence[Array], has_biases: bool, layers: int, bidirectional: bool) -> Stack:
        """Return the stack that an op of torch's arguments has."""
        directions = 2 if bidirectional else 1
        projected = len(params) > layers * directions * (4 if has_biases else 2)
        return cls(CELLS[kind], layers, directions, has_biases, projected)

    @property
    def params(self) -> int:
        """How many parameters a layer has in one direction."""
        return 2 + 2 * self.has_biases + self.projected

    @property
    def kept(self) -> int:
        """How many arrays [time, batch, width] are kept of a layer in one direction: its states, and of the gates."""
        return self.cell.states + self.cell.kept

    def weights(self, params: Sequence[Array]) -> list[Weights]:
        """Return the parameters by layer and direction."""
        found = []
        for start in range(0, len(params), self.params):
            of_input, of_hidden, *rest = params[start : start + self.params]
            biases = tuple(rest[:2]) if self.has_biases else ()
            found.append(Weights(of_input, of_hidden, biases, rest[-1] if self.projected else None))
        return found


@dataclass(frozen=True)
class Packing:
    """How the rows of a packed sequence [N] lie in [time, batch].

    Attributes:
        valid: [time, batch], whether a sequence has not ended.
        spread: [time, batch], the row of the packed sequence.
        packed: [N], where a row is among the elements of [time, batch].
    """

    valid: Array
    spread: Array
    packed: Array

    @classmethod
    def of(cls, m: Arrays, batch_sizes: Array, rows: int, batch: int) -> Packing:
        """Return the packing of sequences, of which ``batch_sizes`` i64[time] go on at each time."""
        ends = m.cumsum(batch_sizes)
        places, columns = m.arange(rows), m.arange(batch)
        time = m.count_up_to(ends, places)
        starts = ends - batch_sizes
        spread = starts[:, None] + columns[None, :]
        valid = columns[None, :] < batch_sizes[:, None]
        return cls(valid, m.where(valid, spread, 0), time * batch + places - m.take(starts, time))


def _spread(m: Arrays, x: Array, packing: Packing | None) -> Array:
    """Return [time, batch, ...] of what may be packed, with zeros behind the end of a sequence."""
    if packing is None:
        return x
    return m.where(packing.valid[:, :, None], m.take(x, packing.spread), 0.0)


def _packed(m: Arrays, x: Array, packing: Packing | None) -> Array:
    """Undo `_spread`."""
    return x if packing is None else m.take(x.reshape(-1, x.shape[-1]), packing.packed)


def forward(
    m: Arrays,
    stack: Stack,
    x: Array,
    batch_sizes: Array | None,
    states: Sequence[Array],
    params: Sequence[Array],
) -> tuple[Array, list[list[Array]], list[Array]]:
    """Run the layers.

    Args:
        x: [time, batch, features], or [N, features] with ``batch_sizes``.
        states: each [layers * directions, batch, width].
        params: as torch has them.

    Returns:
        The output, the last states as lists by layer and direction, and what `backward` needs.
    """
    packing = None if batch_sizes is None else Packing.of(m, batch_sizes, x.shape[0], states[0].shape[1])
    last: list[list[Array]] = [[] for _ in states]
    kept: list[Array] = []
    for unit, weights in enumerate(stack.weights(params)):
        first = tuple([s[unit] for s in states])
        final, ys = _run(m, stack.cell, x, packing, first, weights, unit % stack.directions == 1)
        kept += ys
        for found, s in zip(last, final, strict=True):
            found.append(s)
        if (unit + 1) % stack.directions == 0:
            x = _output(m, stack, kept, packing)
    return x, last, kept


def _output(m: Arrays, stack: Stack, kept: Sequence[Array], packing: Packing | None) -> Array:
    """Return what the layer gives whose arrays are the last of ``kept``."""
    own = kept[-stack.directions * stack.kept :]
    outputs = [_packed(m, own[d * stack.kept], packing) for d in range(stack.directions)]
    return m.concatenate(outputs, -1) if len(outputs) > 1 else outputs[0]


def _run(
    m: Arrays, cell: Cell, x: Array, packing: Packing | None, first: State, weights: Weights, reverse: bool
) -> tuple[State, Sequence[Array]]:
    of_input = m.product(x, weights.of_input.T)
    of_hidden = weights.of_hidden.T
    projection = None if weights.projection is None else weights.projection.T
    if weights.biases:
        of_input = of_input + (weights.biases[0] + weights.biases[1] if cell.shares_gates else weights.biases[0])
    of_input = _spread(m, of_input, packing)
    valid = [] if packing is None else [packing.valid]
    run_cell = m.apart(cell.forward, m)

    def step(state: State, xs: Sequence[Array]) -> New:
        gates, *going_on = xs
        hidden = m.product(state[0], of_hidden)
        if weights.biases and not cell.shares_gates:
            hidden = hidden + weights.biases[1]
        new, kept = run_cell(gates, hidden, state)
        if projection is not None:
            new = (m.product(new[0], projection), *new[1:])
        if going_on:
            new = tuple([m.where(going_on[0][:, None], n, s) for n, s in zip(new, state, strict=True)])
        return new, (*new, *kept)

    return m.loop(step, first, [of_input, *valid], reverse)


def backward(
    m: Arrays,
    stack: Stack,
    grads: Sequence[Array | None],
    x: Array,
    batch_sizes: Array | None,
    states: Sequence[Array],
    params: Sequence[Array],
    kept: Sequence[Array],
) -> tuple[Array, list[list[Array]], list[Array]]:
    """Return the gradients of the input, of the first states by layer and direction, and of the parameters.

    Args:
        grads: of the output and the last states, None where it is zero.
        kept: what `forward` gave; the rest is what it was given.
    """
    packing = None if batch_sizes is None else Packing.of(m, batch_sizes, x.shape[0], states[0].shape[1])
    each, width = stack.directions * stack.kept, states[0].shape[2]
    inputs = [x] + [_output(m, stack, kept[: (i + 1) * each], packing) for i in range(stack.layers - 1)]
    weights = stack.weights(params)
    of_params: list[Array] = []
    of_states: list[list[Array]] = [[] for _ in states]
    grad = grads[0]
    for layer in reversed(range(stack.layers)):
        found: list[tuple[State, Weights]] = []
        below: Array | None = None
        for d in range(stack.directions):
            unit = layer * stack.directions + d
            own = None if grad is None else _spread(m, grad[..., d * width : (d + 1) * width], packing)
            first = tuple([s[unit] for s in states])
            last = tuple([None if g is None else g[unit] for g in grads[1:]])
            ys = kept[unit * stack.kept : (unit + 1) * stack.kept]
            of_input, of_first, of_weights = _run_back(
                m, stack.cell, own, last, inputs[layer], packing, first, weights[unit], ys, d == 1
            )
            below = of_input if below is None else below + of_input
            found.append((of_first, of_weights))
        grad = below
        of_params[:0] = [p for _, of_weights in found for p in of_weights.all]
        for i, of_state in enumerate(of_states):
            of_state[:0] = [of_first[i] for of_first, _ in found]
    return grad, of_states, of_params


def _run_back(
    m: Arrays,
    cell: Cell,
    grad: Array | None,
    last: Sequence[Array | None],
    x: Array,
    packing: Packing | None,
    first: State,
    weights: Weights,
    ys: Sequence[Array],
    reverse: bool,
) -> tuple[Array, State, Weights]:
    """Return the gradients of the input, the first state and the parameters of one layer in one direction."""
    after, kept = ys[: cell.states], ys[cell.states :]
    before = [_shifted(m, a, s, reverse) for a, s in zip(after, first, strict=True)]
    given: list[Array] = [*after, *before, *kept]
    has = {"grad": grad is not None, "valid": packing is not None}
    given += [grad] if has["grad"] else []
    given += [packing.valid] if packing is not None else []

    def step(state: State, xs: Sequence[Array]) -> New:
        rest = list(xs)
        valid = rest.pop()[:, None] if has["valid"] else None
        own = rest.pop() if has["grad"] else None
        of_output = state[0] if own is None else state[0] + own
        s = cell.states
        of_new = (m.product(of_output, weights.projection) if weights.projection is not None else of_output,)
        of_input, of_hidden, direct = cell.backward(
            m, (*of_new, *state[1:]), rest[2 * s :], tuple(rest[s : 2 * s]), tuple(rest[:s])
        )
        if valid is not None:
            of_input, of_hidden = m.where(valid, of_input, 0.0), m.where(valid, of_hidden, 0.0)
        through = m.product(of_hidden, weights.of_hidden)
        new = (through if direct[0] is None else through + direct[0], *direct[1:])
        if valid is not None:
            new = tuple([m.where(valid, n, old) for n, old in zip(new, state, strict=True)])
        gates = (of_input,) if cell.shares_gates else (of_input, of_hidden)
        return new, (*gates, *([of_output] if weights.projection is not None else []))

    start = tuple([m.zeros_like(s) if g is None else g for s, g in zip(first, last, strict=True)])
    of_first, made = m.loop(step, start, given, not reverse)
    made = [_packed(m, y, packing) for y in made]
    of_input, of_hidden = made[0], made[0] if cell.shares_gates else made[1]
    of_biases: tuple[Array, ...] = ()
    if weights.biases:
        total = m.total(of_input)
        of_biases = (total, total if cell.shares_gates else m.total(of_hidden))
    of_projection = None
    if weights.projection is not None:
        unprojected = _packed(m, kept[3] * m.tanh(after[1]), packing)
        of_projection = m.outer(made[-1], unprojected)
    found = Weights(m.outer(of_input, x), m.outer(of_hidden, _packed(m, before[0], packing)), of_biases, of_projection)
    return m.product(of_input, weights.of_input), of_first, found


def _shifted(m: Arrays, after: Array, first: Array, reverse: bool) -> Array:
    """Return the states before each step."""
    parts = [after[1:], first[None]] if reverse else [first[None], after[:-1]]
    return m.concatenate(parts, 0)
