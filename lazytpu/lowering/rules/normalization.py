"""Layer, group, batch and RMS normalization with their gradients; statistics in float32 for half precision."""

import math

import jax.numpy as jnp
import torch
from jax import lax

from lazytpu.lowering.registry import lowers
from lazytpu.lowering.support import sums
from lazytpu.lowering.support.calls import apart
from lazytpu.lowering.support.operands import compute_dtype, rounded

aten = torch.ops.aten


def _moments(x, dims):
    """Return mean and (biased) variance over ``dims``, which stay as dimensions of size one."""
    centre = sums.mean(x, dims)
    return centre, sums.mean(lax.square(x - centre), dims)


def _affine(x, weight, bias, shape):
    """Return ``x * weight + bias``, either of which may be absent, reshaped to ``shape`` first."""
    if weight is not None:
        x = x * weight.astype(x.dtype).reshape(shape)
    return x if bias is None else x + bias.astype(x.dtype).reshape(shape)


def _normalized_dims(x, normalized_shape):
    return tuple(range(x.ndim - len(normalized_shape), x.ndim))


@lowers(aten.native_layer_norm.default, dynamic="eps")
def native_layer_norm(out, x, normalized_shape, weight, bias, eps):
    dtype = compute_dtype(x.dtype)
    dims = _normalized_dims(x, normalized_shape)
    weight, bias = (None if p is None else p.astype(dtype) for p in (weight, bias))
    results = apart(_layer_norm, dims)(x.astype(dtype), weight, bias, jnp.asarray(eps, dtype))
    return tuple(r.reshape(o.shape).astype(o.dtype) for r, o in zip(results, out, strict=True))


def _layer_norm(dims, x, weight, bias, eps):
    """Return what is normalized over the last ``dims``, the means and the inverses of the standard deviations.

    Apart from what surrounds it: ``x`` is in memory then, so the sums can be products (see `sums.total`).
    """
    mean, variance = _moments(x, dims)
    rstd = lax.rsqrt(variance + eps)
    return _affine((x - mean) * rstd, weight, bias, x.shape[dims[0] :]), mean, rstd


@lowers(aten.native_layer_norm_backward.default)
def native_layer_norm_backward(out, grad, x, normalized_shape, mean, rstd, weight, bias, output_mask):
    dtype = compute_dtype(x.dtype)
    lead = x.ndim - len(normalized_shape)
    stat = (*x.shape[:lead], *[1] * len(normalized_shape))
    mean, rstd = mean.astype(dtype).reshape(stat), rstd.astype(dtype).reshape(stat)
    weight = None if weight is None else weight.astype(dtype)
    return _row_gradients(out, output_mask, lead, grad.astype(dtype), x.astype(dtype), mean, rstd, weight)


def _row_gradients(out, mask, lead, *operands):
    """Return the gradients of layer or RMS normalization in the types of ``out``, None for those not wanted."""
    return _by_mask(out, mask, _norm_gradients, (lead,), operands)


def _by_mask(out, mask, function, fixed, operands):
    """Return the gradients that ``function`` gives, apart, in the types of ``out``, None for those not wanted."""
    wanted = tuple(asked and o is not None for asked, o in zip(mask, out, strict=True))
    results = iter(apart(function, *fixed, wanted)(*operands))
    types = zip(wanted, out, strict=True)
    return tuple(next(results).reshape(o.shape).astype(o.dtype) if w else None for w, o in types)


def _norm_gradients(lead, wanted, grad, x, mean, rstd, weight):
    """Return those gradients of the input, the weight and the bias that are ``wanted``.

    Args:
        lead: how many dimensions the rows have, before those that are normalized over.
        mean: None where the root of the squares is all that was divided by.
    """
    rows, dims = tuple(range(lead)), tuple(range(lead, x.ndim))
    xhat = (x if mean is None else x - mean) * rstd
    scaled = grad * xhat
    results = []
    if wanted[0]:
        size = math.prod(x.shape[lead:])
        of_x = _affine(grad, weight, None, x.shape[lead:])
        if mean is not None:
            of_x = of_x - sums.weighted(grad, weight, dims) / size
        results.append(rstd * (of_x - xhat * (sums.weighted(scaled, weight, dims) / size)))
    return results + [sums.total(a, rows) for a, w in zip((scaled, grad), wanted[1:], strict=False) if w]


@lowers(aten.native_group_norm.default, dynamic="eps")
def native_group_norm(out, x, weight, bias, N, C, HxW, group, eps):
    dtype = compute_dtype(x.dtype)
    grouped = x.astype(dtype).reshape(N, group, C // group, HxW)
    weight, bias = (None if p is None else p.astype(dtype) for p in (weight, bias))
    results = apart(_group_norm)(grouped, weight, bias, jnp.asarray(eps, dtype))
    return tuple(r.reshape(o.shape).astype(o.dtype) for r, o in zip(results, out, strict=True))


def _group_norm(x, weight, bias, eps):
    """Return x [image, group, channel, place] normalized by groups, their means and the inverses of the deviations.

    Apart from what surrounds it, so that it is computed once and not for each reader.
    """
    mean, variance = _moments(x, (2, 3))
    rstd = lax.rsqrt(variance + eps)
    return _affine((x - mean) * rstd, weight, bias, (1, *x.shape[1:3], 1)), mean, rstd


@lowers(aten.native_group_norm_backward.default)
def native_group_norm_backward(out, grad, x, mean, rstd, weight, N, C, HxW, group, output_mask):
    dtype = compute_dtype(x.dtype)
    grad, x = (a.astype(dtype).reshape(N, group, C // group, HxW) for a in (grad, x))
    mean, rstd = (s.astype(dtype).reshape(N, group, 1, 1) for s in (mean, rstd))
    weight = None if weight is None else weight.astype(dtype)
    return _by_mask(out, output_mask, _group_gradients, (), (grad, x, mean, rstd, weight))


def _group_gradients(wanted, grad, x, mean, rstd, weight):
    """Return those gradients of x [image, group, channel, place], the weight and the bias that are ``wanted``.

    The sums over the places of a channel serve all three.
    """
    xhat = (x - mean) * rstd
    by_weight, by_bias = (sums.total(a, (3,))[..., None] for a in (grad * xhat, grad))  # [image, group, channel, 1]
    results = []
    if wanted[0]:
        channels = (1, *x.shape[1:3], 1)
        of_mean, of_rstd = (
            jnp.sum(_affine(a, weight, None, channels), 2, keepdims=True) / (x.shape[2] * x.shape[3])
            for a in (by_bias, by_weight)
        )
        results.append(rstd * (_affine(grad, weight, None, channels) - of_mean - xhat * of_rstd))
    return results + [jnp.sum(a, 0) for a, w in zip((by_weight, by_bias), wanted[1:], strict=True) if w]


def _channels(x):
    """Return the shape that puts a vector of channels along dimension 1 of ``x``."""
    return (1, x.shape[1], *[1] * (x.ndim - 2))


@lowers(aten._native_batch_norm_legit_functional.default, dynamic="momentum eps")
def _batch_norm(out, x, weight, bias, running_mean, running_var, training, momentum, eps):
    """Return result, saved mean and 1/std, and the new running statistics (None where there are none)."""
    dtype = compute_dtype(x.dtype)
    dims, channels = (0, *range(2, x.ndim)), _channels(x)
    wide = x.astype(dtype)
    if training:
        mean, variance = _moments(wide, dims)
    else:
        mean, variance = running_mean.astype(dtype).reshape(channels), running_var.astype(dtype).reshape(channels)
    rstd = 1 / jnp.sqrt(variance + jnp.asarray(eps, dtype))
    batch = mean
    if training:  # what the gradient is given is used here too: of half precision, where the weights are
        mean, rstd = rounded(mean, out[1].dtype), rounded(rstd, out[2].dtype)
    y = _affine((wide - mean) * rstd, weight, bias, channels).astype(out[0].dtype)
    if training:
        saved = [s.reshape(o.shape).astype(o.dtype) for s, o in zip((mean, rstd), out[1:3], strict=True)]
    else:
        saved = [jnp.zeros(o.shape, o.dtype) for o in out[1:3]]
    if not training or running_mean is None:
        return y, *saved, running_mean, running_var
    count = x.size // x.shape[1]
    momentum = jnp.asarray(momentum, dtype)
    unbiased = variance * jnp.asarray(count / max(count - 1, 1), dtype)

    def moved(running, batch):
        value = (1 - momentum) * running.astype(dtype) + momentum * batch.reshape(-1)
        return value.astype(running.dtype)

    return y, *saved, moved(running_mean, batch), moved(running_var, unbiased)


@lowers(aten.native_batch_norm.default, dynamic="momentum eps")
def native_batch_norm(out, x, weight, bias, running_mean, running_var, training, momentum, eps):
    """The results alone: the update of the running statistics is recorded as the functional variant."""
    return _batch_norm(out, x, weight, bias, running_mean, running_var, training, momentum, eps)[:3]


@lowers(aten._native_batch_norm_legit.no_stats, dynamic="momentum eps")
def native_batch_norm_no_stats(out, x, weight, bias, training, momentum, eps):
    return _batch_norm(out, x, weight, bias, None, None, True, momentum, eps)[:3]


@lowers(aten._native_batch_norm_legit_no_training.default, dynamic="momentum eps")
def native_batch_norm_no_training(out, x, weight, bias, running_mean, running_var, momentum, eps):
    return _batch_norm(out, x, weight, bias, running_mean, running_var, False, momentum, eps)[:3]


@lowers(aten._batch_norm_with_update_functional.default, dynamic="momentum eps")
def batch_norm_with_update(out, x, weight, bias, running_mean, running_var, momentum, eps):
    y, mean, rstd, new_mean, new_var = _batch_norm(out, x, weight, bias, running_mean, running_var, True, momentum, eps)
    return y, mean, rstd, jnp.zeros(out[3].shape, out[3].dtype), new_mean, new_var


@lowers(aten._batch_norm_no_update.default, dynamic="momentum eps")
def batch_norm_no_update(out, x, weight, bias, running_mean, running_var, momentum, eps):
    results = _batch_norm(out, x, weight, bias, running_mean, running_var, False, momentum, eps)[:3]
    return *results, jnp.zeros(out[3].shape, out[3].dtype)


@lowers(aten.native_batch_norm_backward.default, aten.batch_norm_backward.default, dynamic="eps")
def native_batch_norm_backward(
    out, grad, x, weight, running_mean, running_var, save_mean, save_invstd, train, eps, output_mask, reserve=None
):
    dtype = compute_dtype(x.dtype)
    channels = _channels(x)
    if train:
        mean, rstd = save_mean.astype(dtype), save_invstd.astype(dtype)
    else:
        mean, rstd = running_mean.astype(dtype), 1 / jnp.sqrt(running_var.astype(dtype) + jnp.asarray(eps, dtype))
    mean, rstd = mean.reshape(channels), rstd.reshape(channels)
    weight = None if weight is None else weight.astype(dtype)
    operands = grad.astype(dtype), x.astype(dtype), mean, rstd, weight
    return _by_mask(out, output_mask, _batch_gradients, (bool(train),), operands)


def _batch_gradients(train, wanted, grad, x, mean, rstd, weight):
    """Return those gradients of x [image, channel, *spatial], the weight and the bias that are ``wanted``."""
    dims, channels = (0, *range(2, x.ndim)), _channels(x)
    xhat = (x - mean) * rstd
    # The sums serve the weight and the bias as well as the input.
    by_weight, by_bias = sums.total(grad * xhat, dims), sums.total(grad, dims)
    results = []
    if wanted[0]:
        count = max(x.size // max(x.shape[1], 1), 1)
        centred = grad - (by_bias.reshape(channels) + xhat * by_weight.reshape(channels)) / count if train else grad
        results.append(_affine(centred, weight, None, channels) * rstd)
    return results + [a for a, w in zip((by_weight, by_bias), wanted[1:], strict=True) if w]


@lowers(aten._fused_rms_norm.default, dynamic="eps")
def rms_norm(out, x, normalized_shape, weight, eps):
    dtype = compute_dtype(x.dtype)
    eps = jnp.finfo(dtype).eps if eps is None else jnp.asarray(eps, dtype)
    y, rstd = apart(_rms_norm, _normalized_dims(x, normalized_shape))(x.astype(dtype), weight, eps)
    return y.astype(out[0].dtype), rstd.reshape(out[1].shape).astype(out[1].dtype)


def _rms_norm(dims, x, weight, eps):
    """Return what is normalized over the last ``dims``, and the inverses of the roots, apart as in `_layer_norm`."""
    rstd = lax.rsqrt(sums.mean(lax.square(x), dims) + eps)
    return _affine(x * rstd, weight, None, x.shape[dims[0] :]), rstd


@lowers(aten._fused_rms_norm_backward.default)
def rms_norm_backward(out, grad, x, normalized_shape, rstd, weight, output_mask):
    dtype = compute_dtype(x.dtype)
    lead = x.ndim - len(normalized_shape)
    rstd = rstd.astype(dtype).reshape(*x.shape[:lead], *[1] * len(normalized_shape))
    return _row_gradients(out, output_mask, lead, grad.astype(dtype), x.astype(dtype), None, rstd, weight)


def _other_dims(x, dim):
    return tuple(i for i in range(x.ndim) if i != dim % x.ndim)


@lowers(aten._weight_norm_interface.default)
def weight_norm(out, v, g, dim=0):
    """Return ``v * g / |v|``, the norm taken over all dimensions but ``dim``."""
    wide = v.astype(compute_dtype(v.dtype))
    norm = jnp.sqrt(sums.in_stages(lax.square(wide), _other_dims(v, dim), keepdims=True))
    w = wide * (g.astype(wide.dtype) / norm)
    return w.astype(out[0].dtype), norm.reshape(out[1].shape).astype(out[1].dtype)


@lowers(aten._weight_norm_interface_backward.default)
def weight_norm_backward(out, grad, v, g, norms, dim):
    dtype = compute_dtype(v.dtype)
    grad, v, g, norms = (t.astype(dtype) for t in (grad, v, g, norms))
    of_g = sums.in_stages(grad * v, _other_dims(v, dim), keepdims=True) / norms
    of_v = g / norms * (grad - v * of_g / norms)
    return of_v.astype(out[0].dtype), of_g.reshape(out[1].shape).astype(out[1].dtype)
