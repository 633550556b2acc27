"""Padding with a constant, with the mirror image or with the edge, and the gradients."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from lazytpu.lowering.registry import lowers
from lazytpu.lowering.support.operands import rounded

aten = torch.ops.aten


@lowers(aten.constant_pad_nd.default)
def constant_pad_nd(out, x, pad, value=0):
    ends = [(0, 0, 0)] * x.ndim
    for i in range(len(pad) // 2):
        ends[-1 - i] = (pad[2 * i], pad[2 * i + 1], 0)
    return lax.pad(x, lax.convert_element_type(value, x.dtype), ends)


def _pad_from_itself(x, padding, reflect):
    """Extend the last axes by their mirror image or by their edge; a negative pad crops."""
    for i in range(len(padding) // 2):
        axis, (low, high) = x.ndim - 1 - i, padding[2 * i : 2 * i + 2]
        n, parts = x.shape[axis], [x]
        if reflect:
            if low > 0:
                parts.insert(0, lax.rev(lax.slice_in_dim(x, 1, low + 1, axis=axis), [axis]))
            if high > 0:
                parts.append(lax.rev(lax.slice_in_dim(x, n - 1 - high, n - 1, axis=axis), [axis]))
        else:
            edge = [*x.shape]
            if low > 0:
                edge[axis] = low
                parts.insert(0, jnp.broadcast_to(lax.slice_in_dim(x, 0, 1, axis=axis), edge))
            if high > 0:
                edge[axis] = high
                parts.append(jnp.broadcast_to(lax.slice_in_dim(x, n - 1, n, axis=axis), edge))
        x = lax.concatenate(parts, axis) if len(parts) > 1 else x
        x = lax.slice_in_dim(x, max(-low, 0), x.shape[axis] - max(-high, 0), axis=axis)
    return x


def _pad_gradient(out, grad, x, padding, reflect):
    """Add each padded element's gradient to the one it came from."""
    if x.dtype in (jnp.bfloat16, jnp.float16) and x.size and grad.size:
        return _pad_gradient_in_turn(out, grad, x, padding, reflect)
    _, back = jax.vjp(lambda x: _pad_from_itself(x, padding, reflect), x)
    return back(grad)[0]


def _pad_gradient_in_turn(out, grad, x, padding, reflect):
    """The same in half precision, where the CPU rounds after each element that it adds."""
    n = len(padding) // 2
    lead, inner = x.shape[:-n], x.shape[-n:]
    with jax.ensure_compile_time_eval():
        places = jnp.arange(math.prod(inner), dtype=jnp.int32).reshape(inner)
        places = np.asarray(_pad_from_itself(places, padding, reflect)).reshape(-1)
    order = np.argsort(places, kind="stable")
    count = np.bincount(places, minlength=math.prod(inner))
    start = np.cumsum(count) - count
    rows = lax.reshape(grad, (math.prod(lead), places.size))
    rows = jnp.concatenate([rows, jnp.zeros((len(rows), 1), rows.dtype)], 1).astype(jnp.float32)
    total = jnp.zeros((len(rows), count.size), jnp.float32)
    for i in range(count.max()):  # the elements that come i-th at their place; a zero where there are fewer
        turn = np.where(i < count, order[np.minimum(start + i, places.size - 1)], places.size)
        total = rounded(total + rows[:, turn], x.dtype)
    return lax.reshape(total, out.shape).astype(out.dtype)


def _rules(reflect):
    """Return the rules of padding and of its gradient."""
    return (
        lambda out, x, padding: _pad_from_itself(x, padding, reflect),
        lambda out, grad, x, padding: _pad_gradient(out, grad, x, padding, reflect),
    )


for _name, (_forward, _backward) in (("reflection_pad", _rules(True)), ("replication_pad", _rules(False))):
    for _n in (1, 2, 3):
        lowers(getattr(aten, f"{_name}{_n}d").default)(_forward)
        lowers(getattr(aten, f"{_name}{_n}d_backward").default)(_backward)
