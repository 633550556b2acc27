"""The fused LSTM and GRU cells, to which torch sends the recurrent modules of a device.

The workspace keeps the activated gates for the gradient.
"""

import jax.numpy as jnp
import torch
from jax import lax

from lazytpu.lowering.registry import lowers
from lazytpu.lowering.support.operands import compute_dtype

aten = torch.ops.aten


def _gates(x, bias, n):
    """Return ``x + bias`` in the type to compute in, split into ``n`` gates."""
    x = x.astype(compute_dtype(x.dtype))
    x = x if bias is None else x + bias.astype(x.dtype)
    return jnp.split(x, n, -1)


def _rounded(out, results):
    """Return the results in the types of ``out``; None where torch has no result."""
    return tuple(None if o is None else r.astype(o.dtype) for r, o in zip(results, out, strict=True))


@lowers(aten._thnn_fused_lstm_cell.default)
def lstm_cell(out, input_gates, hidden_gates, cx, input_bias=None, hidden_bias=None):
    gates = zip(_gates(input_gates, input_bias, 4), _gates(hidden_gates, hidden_bias, 4), strict=True)
    i, f, g, o = (a + b for a, b in gates)
    i, f, g, o = lax.logistic(i), lax.logistic(f), jnp.tanh(g), lax.logistic(o)
    cy = f * cx.astype(f.dtype) + i * g
    return _rounded(out, (o * jnp.tanh(cy), cy, jnp.concatenate([i, f, g, o], -1)))


@lowers(aten._thnn_fused_lstm_cell_backward_impl.default)
def lstm_cell_backward(out, grad_hy, grad_cy, cx, cy, workspace, has_bias):
    i, f, g, o = _gates(workspace, None, 4)
    cx, t = cx.astype(i.dtype), jnp.tanh(cy.astype(i.dtype))
    of_hy, of_cy = (jnp.zeros_like(cx) if d is None else d.astype(i.dtype) for d in (grad_hy, grad_cy))
    of_c = of_cy + of_hy * o * (1 - t * t)
    parts = of_c * g * i * (1 - i), of_c * cx * f * (1 - f), of_c * i * (1 - g * g), of_hy * t * o * (1 - o)
    gates = jnp.concatenate(parts, -1)
    return _rounded(out, (gates, of_c * f, jnp.sum(gates, 0) if has_bias else None))


@lowers(aten._thnn_fused_gru_cell.default)
def gru_cell(out, input_gates, hidden_gates, hx, input_bias=None, hidden_bias=None):
    ir, iz, n = _gates(input_gates, input_bias, 3)
    hr, hz, hn = _gates(hidden_gates, hidden_bias, 3)
    r, z = lax.logistic(ir + hr), lax.logistic(iz + hz)
    n, h = jnp.tanh(n + r * hn), hx.astype(r.dtype)
    return _rounded(out, (n + z * (h - n), jnp.concatenate([r, z, n, h, hn], -1)))


@lowers(aten._thnn_fused_gru_cell_backward.default)
def gru_cell_backward(out, grad_hy, workspace, has_bias):
    r, z, n, h, hn = _gates(workspace, None, 5)
    grad = grad_hy.astype(r.dtype)
    of_n = grad * (1 - z) * (1 - n * n)
    of_z = grad * (h - n) * z * (1 - z)
    of_r = of_n * hn * r * (1 - r)
    of_input = jnp.concatenate([of_r, of_z, of_n], -1)
    of_hidden = jnp.concatenate([of_r, of_z, of_n * r], -1)
    biases = (jnp.sum(of_input, 0), jnp.sum(of_hidden, 0)) if has_bias else (None, None)
    return _rounded(out, (of_input, of_hidden, grad * z, *biases))
