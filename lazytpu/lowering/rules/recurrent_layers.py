"""Recurrent layers, ``nn.LSTM``, ``nn.GRU`` and ``nn.RNN``, as one op with one gradient op: loops over time.

``lazytpu::lstm`` and its like take sequences in the order [time, batch, features] or packed, and all of their layers'
parameters, and return the output, the last states and, if ``keep``, what the gradient needs.  Dropout between layers is
an op of its own between two of these.  Half precision is computed in float32 from the first step to the last; on GPUs
and TPUs the operands of the products are halves.  The ops of ``nn.LSTMCell`` and ``nn.GRUCell`` are here too.
"""

import jax
import jax.numpy as jnp
import torch
from jax import lax

from lazytpu.lowering.registry import lowers_each, target_platform
from lazytpu.lowering.support import recurrence
from lazytpu.lowering.support.calls import apart
from lazytpu.lowering.support.operands import compute_dtype
from lazytpu.lowering.support.recurrence import Stack
from lazytpu.lowering.support.recurrent_cells import CELLS, FUSED
from lazytpu.lowering.support.sums import total

library = torch.library.Library("lazytpu", "FRAGMENT")
_LAYERS = "bool has_biases, int num_layers, bool bidirectional"
_GIVEN = "Tensor input, Tensor? batch_sizes, Tensor[] states, Tensor[] params"
for _kind in CELLS:
    library.define(f"{_kind}({_GIVEN}, {_LAYERS}, bool keep=False) -> Tensor[]")
    library.define(f"{_kind}_backward(Tensor?[] grads, {_GIVEN}, Tensor[] kept, {_LAYERS}) -> Tensor[]")
FORWARD = {kind: getattr(torch.ops.lazytpu, kind).default for kind in CELLS}
BACKWARD = {kind: getattr(torch.ops.lazytpu, f"{kind}_backward").default for kind in CELLS}


class _JaxArrays:
    """What the loops do with jax's arrays.

    Attributes:
        wide: the type to compute in.
        factor: that of the operands of products: halves stay what they are where there are units for them.
    """

    def __init__(self, dtype):
        self.wide = compute_dtype(dtype)
        self.factor = self.wide if target_platform() == "cpu" else dtype

    def weight(self, x):
        """Return a parameter in the type in which it is used."""
        return x.astype(self.factor if x.ndim == 2 else self.wide)

    def _dot(self, a, b, dims):
        a, b = a.astype(self.factor), b.astype(self.factor)
        return lax.dot_general(a, b, (dims, ((), ())), preferred_element_type=self.wide)

    def product(self, x, weight):
        return self._dot(x, weight, ((x.ndim - 1,), (0,)))

    def outer(self, grad, x):
        rows = tuple(range(grad.ndim - 1))
        return self._dot(grad, x, (rows, rows))

    def total(self, grad):
        return total(grad, range(grad.ndim - 1))

    def loop(self, step, state, xs, reverse):
        return lax.scan(step, state, list(xs), reverse=reverse)

    def split(self, x, parts):
        return jnp.split(x, parts, -1)

    def take(self, x, rows):
        return jnp.take(x, rows, axis=0, mode="clip")

    def count_up_to(self, ends, places):
        return jnp.searchsorted(ends, places, side="right").astype(places.dtype)

    def arange(self, n):
        return jnp.arange(n, dtype=jnp.int64)

    def relu(self, x):
        return jnp.maximum(x, 0)

    apart = staticmethod(apart)
    sigmoid, tanh = staticmethod(lax.logistic), staticmethod(jnp.tanh)
    concatenate, where = staticmethod(jnp.concatenate), staticmethod(jnp.where)
    zeros_like, cumsum = staticmethod(jnp.zeros_like), staticmethod(jnp.cumsum)


def _wide(m, arrays):
    return [None if x is None else x.astype(m.wide) for x in arrays]


def _rounded(out, results):
    return [None if o is None else x.astype(o.dtype) for x, o in zip(results, out, strict=True)]


def _forward_rule(kind):
    def rule(out, x, batch_sizes, states, params, has_biases, num_layers, bidirectional, keep=False):
        m, stack = _JaxArrays(x.dtype), Stack.of(kind, params, has_biases, num_layers, bidirectional)
        x, *states = _wide(m, [x, *states])
        y, last, kept = recurrence.forward(m, stack, x, batch_sizes, states, [m.weight(p) for p in params])
        return _rounded(out, [y, *map(jnp.stack, last), *(kept if keep else [])])

    return rule


def _backward_rule(kind):
    def rule(out, grads, x, batch_sizes, states, params, kept, has_biases, num_layers, bidirectional):
        m, stack = _JaxArrays(x.dtype), Stack.of(kind, params, has_biases, num_layers, bidirectional)
        x, *states = _wide(m, [x, *states])
        of_x, of_states, of_params = recurrence.backward(
            m, stack, _wide(m, grads), x, batch_sizes, states, [m.weight(p) for p in params], _wide(m, kept)
        )
        return _rounded(out, [of_x, *map(jnp.stack, of_states), *of_params])

    return rule


def _fused_rule(cell):
    def rule(out, *args):
        m = _JaxArrays(next(x for x in args if x is not None).dtype)
        return tuple(_rounded(out, cell(m, *[x.astype(m.wide) if isinstance(x, jax.Array) else x for x in args])))

    return rule


lowers_each({op: _fused_rule(cell) for op, cell in FUSED.items()})
lowers_each({op: _forward_rule(kind) for kind, op in FORWARD.items()})
lowers_each({op: _backward_rule(kind) for kind, op in BACKWARD.items()})
