"""Connectionist temporal classification loss (Graves et al., 2006), in log space.

A target of S labels is read as 2S+1 states: a blank, then each label followed by a blank.
"""

import jax.numpy as jnp
import torch
from jax import lax

from lazytpu.lowering.registry import lowers

aten = torch.ops.aten


def _states(targets, target_lengths, blank, batch, count):
    """Return the label of each of ``count`` states, [batch, count]; 1-d targets are all rows one after the other."""
    labels = count // 2
    if targets.ndim == 1 and batch > 0:
        start = jnp.cumsum(target_lengths) - target_lengths
        at = start[:, None] + jnp.arange(labels)
        targets = jnp.take(targets, at, mode="clip") if targets.size else jnp.zeros(at.shape, targets.dtype)
    states = jnp.full((batch, count), blank, jnp.int32)
    return states.at[:, 1::2].set(targets[:, :labels].astype(jnp.int32))


def _inputs(log_probs, targets, input_lengths, target_lengths, blank, count):
    """Return emissions [time, batch, state], their labels, which states may be entered from two before, and lengths."""
    log_probs = log_probs if log_probs.ndim == 3 else log_probs[:, None]
    batch = log_probs.shape[1]
    lengths, target_lengths = (jnp.asarray(n, jnp.int32).reshape(-1) for n in (input_lengths, target_lengths))
    states = _states(targets, target_lengths, blank, batch, count)
    emitted = jnp.take_along_axis(log_probs, jnp.broadcast_to(states, (len(log_probs), batch, count)), 2, mode="clip")
    jumps = jnp.pad(states[:, 2:] != states[:, :-2], ((0, 0), (2, 0)))[:, :count]
    return log_probs, emitted, states, jumps, lengths, target_lengths


def _shifted(x, by):
    """Return ``x`` [batch, state] moved ``by`` states up (or down), with log 0 moving in."""
    low = jnp.full((x.shape[0], min(abs(by), x.shape[1])), -jnp.inf, x.dtype)  # one state has none beside it
    return jnp.concatenate([low, x[:, :-by]] if by > 0 else [x[:, -by:], low], 1)


def _log_sum(*xs):
    """Return the logarithm of the sum of exponentials; -inf where all are -inf."""
    top = jnp.stack(xs).max(0)
    safe = jnp.where(top == -jnp.inf, 0, top)
    return jnp.log(sum(jnp.exp(x - safe) for x in xs)) + safe


def _final(x, target_lengths):
    """Return the log of the sum of the last two of each row's states."""
    last = 2 * target_lengths[:, None]
    end = jnp.take_along_axis(x, last, 1, mode="clip")
    label = jnp.take_along_axis(x, jnp.maximum(last - 1, 0), 1, mode="clip")
    return _log_sum(end, jnp.where(last > 0, label, -jnp.inf))[:, 0]


@lowers(aten._ctc_loss.default, aten._ctc_loss.Tensor)
def ctc_loss(out, log_probs, targets, input_lengths, target_lengths, blank=0, zero_infinity=False):
    nll, log_alpha = out
    inputs = _inputs(log_probs, targets, input_lengths, target_lengths, blank, log_alpha.shape[-1])
    _, emitted, _, jumps, lengths, target_lengths = inputs
    state = jnp.arange(emitted.shape[2])
    inside = state <= 2 * target_lengths[:, None]

    def step(alpha, emission):
        two = jnp.where(jumps, _shifted(alpha, 2), -jnp.inf)
        new = jnp.where(inside, emission + _log_sum(alpha, _shifted(alpha, 1), two), -jnp.inf)
        return new, new

    first = jnp.where(inside & (state < 2), emitted[0], -jnp.inf)
    _, rest = lax.scan(step, first, emitted[1:])
    alphas = jnp.concatenate([first[None], rest])
    at_end = jnp.take_along_axis(alphas, jnp.maximum(lengths - 1, 0)[None, :, None], 0)[0]
    likelihood = _final(at_end, target_lengths)
    likelihood = jnp.where(lengths == 0, jnp.where(target_lengths == 0, 0, -jnp.inf), likelihood)
    alphas = jnp.swapaxes(alphas, 0, 1)
    return (-likelihood).reshape(nll.shape).astype(nll.dtype), alphas.reshape(log_alpha.shape).astype(log_alpha.dtype)


@lowers(aten._ctc_loss_backward.default, aten._ctc_loss_backward.Tensor)
def ctc_loss_backward(
    out, grad, log_probs, targets, input_lengths, target_lengths, nll, log_alpha, blank, zero_infinity=False
):
    """Return ``exp(log_probs)`` less the share of paths through each label: the gradient through a log-softmax."""
    count = log_alpha.shape[-1]
    log_probs, emitted, states, jumps, lengths, target_lengths = _inputs(
        log_probs, targets, input_lengths, target_lengths, blank, count
    )
    times, batch, classes = log_probs.shape
    state = jnp.arange(count)
    inside = state <= 2 * target_lengths[:, None]
    final = inside & (state >= 2 * target_lengths[:, None] - 1)
    leaves = jnp.pad(jumps[:, 2:], ((0, 0), (0, 2)))[:, :count]

    def step(beta, now):
        emission, t = now
        two = jnp.where(leaves, _shifted(beta, -2), -jnp.inf)
        new = emission + _log_sum(beta, _shifted(beta, -1), two)
        new = jnp.where((t == lengths - 1)[:, None], jnp.where(final, emission, -jnp.inf), new)
        new = jnp.where(inside & (t < lengths)[:, None], new, -jnp.inf)
        return new, new

    start = jnp.full((batch, count), -jnp.inf, emitted.dtype)
    _, betas = lax.scan(step, start, (emitted, jnp.arange(times)), reverse=True)
    alphas = jnp.swapaxes(log_alpha.reshape(batch, times, count), 0, 1)
    both = jnp.where(inside, alphas + betas, -jnp.inf)
    top = both.max(2, keepdims=True)
    top = jnp.where(top == -jnp.inf, 0, top)
    rows = jnp.arange(batch)[:, None]
    paths = jnp.zeros(log_probs.shape, log_probs.dtype).at[:, rows, states].add(jnp.exp(both - top))
    nll = nll.reshape(1, batch, 1)
    result = jnp.exp(log_probs) - jnp.where(paths > 0, jnp.exp(jnp.log(paths) + top + nll - log_probs), 0)
    if not zero_infinity:
        result = jnp.where(nll == jnp.inf, jnp.nan, result)
    result = result * grad.reshape(1, batch, 1)
    result = jnp.where((jnp.arange(times)[:, None] < lengths)[:, :, None], result, 0)
    if zero_infinity:
        result = jnp.where(nll == jnp.inf, 0, result)
    return result.reshape(out.shape).astype(out.dtype)
