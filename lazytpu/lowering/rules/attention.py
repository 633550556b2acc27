"""Scaled dot product attention, in the forms in which torch asks a device for it.

Only the logarithm of each row's sum is kept for the gradient, which computes the weights again.  The
causal mask is a comparison of indices, never an array of its own.  Several query heads may share one
key head: they are then rows of the same product.
"""

import jax
import jax.numpy as jnp
import torch
from jax import lax

from lazytpu.lowering.registry import lowers
from lazytpu.lowering.rules.matmul import product
from lazytpu.lowering.rules.random_numbers import mask
from lazytpu.lowering.support import attention_blocks as blocks
from lazytpu.lowering.support.maxima import shift
from lazytpu.lowering.support.operands import compute_dtype

aten = torch.ops.aten


def _batched(a, b, a_dim, b_dim):
    """Return products over the last two dimensions, contracted along ``a_dim`` and ``b_dim`` (-1 or -2)."""
    batch = tuple(range(a.ndim - 2))
    return product(a, b, ((a.ndim + a_dim,), (b.ndim + b_dim,)), (batch, batch))


def _grouped(x, like):
    """Return ``x`` [..., heads, rows, width] with the heads that share one head of ``like`` laid out as rows."""
    return x if x.shape[-3] == like.shape[-3] else x.reshape(*like.shape[:-2], -1, x.shape[-1])


def _masked_scores(q, k, bias, is_causal, scale, first=0):
    """Return ``scale * q k^T + bias`` [..., heads, queries, keys] in the type to compute in, from row ``first`` on.

    A bias of booleans is a mask, and what is False in it is not seen.
    """
    dtype = compute_dtype(q.dtype)
    scale = jnp.asarray(q.shape[-1] ** -0.5 if scale is None else scale, dtype)
    early = q.dtype == dtype  # after the product LLVM would leave out a rounding: see `lowering/rounded_products`
    scores = _batched(_grouped(q * scale if early else q, k), k, -1, -1).reshape(*q.shape[:-1], k.shape[-2])
    scores = scores if early else scores * scale
    if bias is not None:
        scores = scores + (jnp.where(bias, 0.0, -jnp.inf) if bias.dtype == bool else bias).astype(dtype)
    if is_causal:
        rows, columns = (lax.broadcasted_iota(jnp.int32, scores.shape, scores.ndim - i) for i in (2, 1))
        scores = jnp.where(rows + jnp.asarray(first, jnp.int32) >= columns, scores, -jnp.inf)
    return scores


def _weights(scores, logsumexp):
    """Return the softmax from the kept logarithms, for gradients; a row that is masked throughout gets zeros."""
    if logsumexp.dtype != scores.dtype:  # torch keeps float32 of float64, of which the CPU keeps all: found again
        logsumexp = jax.nn.logsumexp(scores, -1)
    return jnp.exp(scores - jnp.where(logsumexp == -jnp.inf, 0, logsumexp)[..., None])


def _dropped(weights, dropout_p, rng):
    """Return the weights after dropout, whose mask is made from ``rng`` alone and so can be made again."""
    keep = 1.0 - jnp.asarray(dropout_p, jnp.float64)
    factor = jnp.where(keep == 0, 0.0, 1 / keep).astype(weights.dtype)
    return jnp.where(mask(rng, weights.shape, keep), weights * factor, 0)


def _attention(out, q, k, v, bias, dropout_p, is_causal, scale, rng):
    """Return the result and the logarithms of the sums, in the types of ``out[0]`` and ``out[1]``."""
    rows = _rows_at_a_time(q, k, bias, rng)
    how = dropout_p, is_causal, scale
    y, logs = _in_turns(q, k, v, bias, rng, rows, how) if rows else _at_once(q, k, v, bias, rng, *how)
    return y.reshape(out[0].shape).astype(out[0].dtype), logs.reshape(out[1].shape).astype(out[1].dtype)


def _rows_at_a_time(q, k, bias, rng):
    """As `blocks.rows_at_a_time`; 0 where the gradient of a bias, which takes all rows, needs what was dropped."""
    return 0 if bias is not None and rng is not None else blocks.rows_at_a_time(q, k)


def _in_turns(q, k, v, bias, rng, rows, how):
    results = []
    for span in blocks.spans(q.shape[-2], k.shape[-2], rows, how[1]):
        keys, values, of_keys = k[..., : span[2], :], v[..., : span[2], :], _some_keys(bias, span[2])

        def iteration(first, count=rows, keys=keys, values=values, of_keys=of_keys):
            part = blocks.some_rows(q, first, count), keys, values, blocks.some_rows(of_keys, first, count)
            y, logs = _at_once(*part, blocks.key_of(rng, first), *how, first=first)
            return y.reshape(*q.shape[:-2], count, -1), logs[..., None]

        count, rest, left = blocks.iterations(span, rows)
        if count:
            results.append(
                [
                    blocks.joined(x)
                    for x in lax.map(lambda i, t=iteration, s=span[0]: t(s + i * rows), jnp.arange(count))
                ]
            )
        if left:
            results.append(iteration(rest, left))
    y, logs = (jnp.concatenate(parts, -2) for parts in zip(*results, strict=True))
    return y, logs[..., 0]


def _some_keys(bias, keys):
    """Return the bias of the first keys."""
    return bias if bias is None or bias.shape[-1] == 1 else bias[..., :keys]


def _at_once(q, k, v, bias, rng, dropout_p, is_causal, scale, first=0):
    scores = _masked_scores(q, k, bias, is_causal, scale, first)
    top = shift(scores, -1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(top == -jnp.inf, 0, top))
    total = jnp.sum(weights, -1, keepdims=True)
    logs = (jnp.log(total) + top)[..., 0]
    weights = weights / jnp.where(total == 0, 1, total)  # from `logs` they would not add up to one, nor would gradients
    if rng is not None:
        weights = _dropped(weights, dropout_p, rng)
    return _batched(_grouped(weights.astype(v.dtype), v), v, -1, -2), logs


def _gradients(out, grad, q, k, v, bias, result, logs, dropout_p, is_causal, scale, rng):
    """Return the gradients of q, k, v and the bias; ``out`` holds None for those that are not wanted."""
    logs = logs.reshape(q.shape[:-1])
    rows = 0 if len(out) > 3 and out[3] is not None else _rows_at_a_time(q, k, bias, rng)
    how = dropout_p, is_causal, scale
    if rows:
        results = _gradients_in_turns(grad, q, k, v, bias, result, logs, rng, rows, how)
    else:
        results = _gradients_at_once(grad, q, k, v, bias, result, logs, rng, *how)
    if len(out) > 3:
        results[3:] = [None if out[3] is None else _summed_to(results[3], out[3].shape)]
    return tuple(None if o is None else r.reshape(o.shape).astype(o.dtype) for r, o in zip(results, out, strict=False))


def _gradients_in_turns(grad, q, k, v, bias, result, logs, rng, rows, how):
    of_q, sums = [], [jnp.zeros(x.shape, compute_dtype(x.dtype)) for x in (k, v)]
    for span in blocks.spans(q.shape[-2], k.shape[-2], rows, how[1]):
        keys, values, of_keys = k[..., : span[2], :], v[..., : span[2], :], _some_keys(bias, span[2])

        def iteration(carry, first, count=rows, keys=keys, values=values, of_keys=of_keys):
            g, some_q, y, log = (blocks.some_rows(x, first, count) for x in (grad, q, result, logs[..., None]))
            part = g, some_q, keys, values, blocks.some_rows(of_keys, first, count), y, log[..., 0]
            dq, dk, dv, _ = _gradients_at_once(*part, blocks.key_of(rng, first), *how, first=first)
            added = [c + d.reshape(c.shape) for c, d in zip(carry, (dk, dv), strict=True)]
            return added, dq.reshape(some_q.shape)

        carry = [x[..., : span[2], :] for x in sums]
        count, rest, left = blocks.iterations(span, rows)
        if count:
            carry, dq = lax.scan(lambda c, i, t=iteration, s=span[0]: t(c, s + i * rows), carry, jnp.arange(count))
            of_q.append(blocks.joined(dq))
        if left:
            carry, dq = iteration(carry, rest, left)
            of_q.append(dq)
        sums = [jnp.concatenate([c, x[..., span[2] :, :]], -2) for c, x in zip(carry, sums, strict=True)]
    return [jnp.concatenate(of_q, -2), *sums]


def _gradients_at_once(grad, q, k, v, bias, result, logs, rng, dropout_p, is_causal, scale, first=0):
    """Return the gradients of q, k and v, and of the scores."""
    dtype = compute_dtype(q.dtype)
    factor = jnp.asarray(q.shape[-1] ** -0.5 if scale is None else scale, dtype)
    weights = _weights(_masked_scores(q, k, bias, is_causal, scale, first), logs)
    used, of_weights = weights, _batched(_grouped(grad, v), v, -1, -1).reshape(weights.shape)
    if rng is not None:
        used, of_weights = (_dropped(w, dropout_p, rng) for w in (weights, of_weights))
    along = jnp.sum(grad.astype(dtype) * result.astype(dtype), -1, keepdims=True)
    of_scores = weights * (of_weights - along)
    rows = _grouped((of_scores * factor).astype(q.dtype), k)
    return [
        _batched(rows, k, -1, -2),
        _batched(rows, _grouped(q, k), -2, -2),
        _batched(_grouped(used.astype(v.dtype), v), _grouped(grad, v), -2, -2),
        of_scores,
    ]


def _summed_to(x, shape):
    """Return sum ``x`` over the dimensions along which ``shape`` was broadcast."""
    shape = (1,) * (x.ndim - len(shape)) + tuple(shape)
    return jnp.sum(x, tuple(i for i, n in enumerate(shape) if n == 1 and x.shape[i] != 1), keepdims=True)


def _wants_dropout(dropout_p):
    """Return whether there is dropout: a number that is not known while lowering counts as some."""
    return not isinstance(dropout_p, int | float) or dropout_p > 0


def _kept(rng, types):
    """Return seed and counter as results of ``types``, for the gradient; zeros where nothing was random."""
    parts = (jnp.zeros((), jnp.uint64),) * 2 if rng is None else (rng[0], rng[1])
    return tuple(p.astype(t.dtype).reshape(t.shape) for p, t in zip(parts, types, strict=True))


def _key(seed, offset):
    """Return the ``rng`` that ``_kept`` was given."""
    return jnp.stack([seed.reshape(()), offset.reshape(())]).astype(jnp.uint64)


@lowers(aten._scaled_dot_product_fused_attention_overrideable.default, dynamic="dropout_p scale")
def fused_attention(
    out, q, k, v, attn_bias=None, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None, rng=None
):
    rng = rng if _wants_dropout(dropout_p) else None
    y, logs = _attention(out, q, k, v, attn_bias, dropout_p, is_causal, scale, rng)
    return y, logs, None, None, q.shape[-2], k.shape[-2], *_kept(rng, out[6:8]), None


@lowers(aten._scaled_dot_product_fused_attention_overrideable_backward.default, dynamic="dropout_p scale")
def fused_attention_backward(
    out,
    grad,
    q,
    k,
    v,
    attn_bias,
    grad_input_mask,
    result,
    logsumexp,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    philox_seed,
    philox_offset,
    *,
    scale=None,
):
    wanted = tuple(o if want else None for o, want in zip(out, grad_input_mask, strict=True))
    rng = _key(philox_seed, philox_offset) if _wants_dropout(dropout_p) else None
    return _gradients(wanted, grad, q, k, v, attn_bias, result, logsumexp, dropout_p, is_causal, scale, rng)


@lowers(aten._scaled_dot_product_flash_attention_for_cpu.default, dynamic="dropout_p scale")
def flash_attention(out, q, k, v, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None, rng=None):
    """Torch itself allows no dropout here."""
    return _attention(out, q, k, v, attn_mask, dropout_p, is_causal, scale, None)


@lowers(aten._scaled_dot_product_flash_attention_for_cpu_backward.default, dynamic="dropout_p scale")
def flash_attention_backward(
    out, grad, q, k, v, result, logsumexp, dropout_p, is_causal, *, attn_mask=None, scale=None
):
    return _gradients(out, grad, q, k, v, attn_mask, result, logsumexp, dropout_p, is_causal, scale, None)
