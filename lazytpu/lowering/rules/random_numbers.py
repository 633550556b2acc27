"""Random numbers: bits from a keyed hash of the element's index, and the distributions made of them.

The generator was chosen by measurement.  One million uniform float32 numbers in a jitted program on two
cores of an AMD EPYC, in ms (a copy of the array takes 0.08): this hash 0.21, Squares 0.15, Philox4x32-7 and
Philox2x32-7 written in lax 0.56 and 0.52, jax's threefry2x32 1.6, ``lax.rng_bit_generator`` 1.6 (threefry) and
5.0 (Philox); torch's own ``rand`` 2.1.  Squares needs 64-bit products, which AVX2, most GPUs and TPUs lack; the
hash has four 32-bit ones, no state and no loop, so XLA fuses it into the dropout that uses it (0.26 ms in all).

Element ``i`` of the stream with keys ``(k, s)`` is ``m(a + s) + a`` with ``a = m(i ^ k)``, where ``m`` is the 32-bit
finalizer "lowbias32" of C. Wellons (every input bit flips every output bit with probability 1/2, within 0.2 %).
Adding ``a`` makes a function of the permutation ``m(a + s)``, so values repeat as random ones do.  For 48 streams
of 2^20 words (4 seeds, 12 counters) the worst of about 3000 tests was 3.2 sigma (3.7 for numpy's PCG64): single
bits, high and low 12 bits, pairs of neighbours at lags 1, 2, 64, 784 and 1024, the same element of streams with
consecutive counters.  400 streams repeat 127.3 words each on average, 128.0 +- 0.6 are expected.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from lazytpu.lowering.registry import lowers, lowers_each, target_platform
from lazytpu.lowering.support.operands import (
    cast,
    compute_dtype,
    is_floating,
    operand,
    operands,
    rounded_as_is,
    spread,
)
from lazytpu.lowering.support.sort_keys import places_in_order

aten = torch.ops.aten


def mix(x):
    """Mix the 32 bits of each word (lowbias32)."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return x ^ (x >> np.uint32(16))


@jax.jit
def _keys(rng):
    """Return the two uint32 keys of the stream ``rng`` = uint64 [seed, counter]."""
    words = lax.bitcast_convert_type(rng, jnp.uint32).reshape(4)
    keys = jnp.array([0x243F6A88, 0x85A308D3], jnp.uint32)  # digits of pi: any two different constants do
    for word in words:
        keys = mix(keys ^ word) + np.uint32(0x9E3779B9)
    return keys


@partial(jax.jit, static_argnums=(1, 2))
def _bits(rng, shape, double):
    k, s = _keys(rng)
    i = lax.iota(jnp.uint32, int(np.prod(shape, dtype=np.int64))).reshape(shape)
    a = mix(i ^ k)
    word = mix(a + s) + a
    if not double:
        return word
    b = mix(i + s)
    return (word.astype(jnp.uint64) << np.uint64(32)) | (mix(b ^ k) + b).astype(jnp.uint64)


def bits(rng, shape, dtype=jnp.uint32):
    """Return random bits of the stream ``rng``.

    Args:
        rng: uint64 [seed, counter]; the same pair always gives the same bits.
        shape: shape of the result.
        dtype: ``uint32`` or ``uint64``.
    """
    return _bits(rng, tuple(shape), np.dtype(dtype) == np.uint64)


def uniforms(rng, shape, dtype=jnp.float32):
    """Return uniform numbers of [0, 1) in float32 or float64."""
    if np.dtype(dtype) == np.float64:
        return (bits(rng, shape, jnp.uint64) >> np.uint64(11)).astype(jnp.float64) * np.float64(2.0**-53)
    return (bits(rng, shape) >> np.uint32(8)).astype(jnp.float32) * np.float32(2.0**-24)


def open_uniforms(rng, shape, dtype=jnp.float32):
    """Return uniform numbers of (0, 1) in float32 or float64, symmetric about 1/2."""
    if np.dtype(dtype) == np.float64:
        return ((bits(rng, shape, jnp.uint64) >> np.uint64(12)).astype(jnp.float64) + 0.5) * np.float64(2.0**-52)
    return ((bits(rng, shape) >> np.uint32(9)).astype(jnp.float32) + np.float32(0.5)) * np.float32(2.0**-23)


def normals(rng, shape, dtype=jnp.float32):
    """Return standard normal numbers in float32, float64, complex64 or complex128 (variance 1 in all)."""
    dtype = np.dtype(dtype)
    if jnp.issubdtype(dtype, jnp.complexfloating):
        real = np.dtype("float32") if dtype == np.complex64 else np.dtype("float64")
        parts = normals(rng, (2, *shape), real) * real.type(np.sqrt(0.5))
        return lax.complex(parts[0], parts[1])
    return normals_of(open_uniforms(rng, shape, dtype))


def normals_of(u):
    """Return standard normal numbers, each of a uniform one of (0, 1)."""
    return rounded_as_is(u.dtype.type(np.sqrt(2)) * lax.erf_inv(2 * u - 1))


def mask(rng, shape, p):
    """Return true with probability ``p`` (a number, a 0-d array or an array of ``shape``); exact for 0 and 1."""
    p = jnp.asarray(p, jnp.float64) if not hasattr(p, "dtype") else cast(p, compute_dtype(p.dtype))
    limit = lax.convert_element_type(p * np.array(2.0**31, p.dtype), jnp.uint32)
    return lax.lt(bits(rng, shape) >> np.uint32(1), spread(limit, shape))


def _generator_key(rng):
    """Return a key for the samplers of jax.random."""
    return jax.random.wrap_key_data(_keys(rng), impl="threefry2x32")


def _masked_scale(x, keep, scale, dtype):
    """Return ``x * scale`` where ``keep``, else 0, in ``dtype``."""
    wide = compute_dtype(dtype)
    scaled = lax.mul(cast(x, wide), lax.full(x.shape, cast(scale, wide)))
    return cast(lax.select(keep, scaled, lax.full_like(scaled, 0)), dtype)


@lowers(aten.native_dropout.default, dynamic="p")
def native_dropout(out, x, p, train=None, *, rng):
    if train is False:
        return x, lax.full(x.shape, True, bool)
    share = 1.0 - jnp.asarray(p, jnp.float64)
    keep = mask(rng, x.shape, share)
    return _masked_scale(x, keep, jnp.where(share == 0, 0.0, 1 / share), x.dtype), keep


@lowers(aten.native_dropout_backward.default, dynamic="scale")
def native_dropout_backward(out, grad, keep, scale):
    return _masked_scale(grad, keep, scale, out.dtype)


def _sampled(sampler):
    """Return the rule of an op whose numbers, ``sampler(rng, shape, dtype)``, are made in the computation dtype."""
    return lambda out, *_, rng, **__: cast(sampler(rng, out.shape, compute_dtype(out.dtype)), out.dtype)


lowers_each(
    {
        op: _sampled(sampler)
        for sampler, ops in {
            uniforms: (aten.rand.default, aten.rand.generator, aten.rand_like.default, aten.rand_like.generator),
            normals: (aten.randn.default, aten.randn.generator, aten.randn_like.default, aten.randn_like.generator),
        }.items()
        for op in ops
    }
)


def _moved(x, factor, shift):
    """Return ``x * factor + shift``, rounded alike whether a graph is interpreted or compiled.

    LLVM may or may not round the product before the sum; in float64 a product of float32 is exact, so both agree.
    """
    if x.dtype != jnp.float32 or target_platform() != "cpu":
        return rounded_as_is(x * factor) + shift
    wide, factor, shift = (cast(y, jnp.float64) for y in (x, factor, shift))
    return cast(wide * factor + shift, x.dtype)


@lowers(aten.uniform.default, dynamic="from to")
def uniform(out, x, low=0.0, high=1.0, *, rng, generator=None, **ends):
    u = uniforms(rng, out.shape, compute_dtype(out.dtype))
    low, high = operands(out, ends.get("from", low), ends.get("to", high))
    return cast(_moved(u, high - low, low), out.dtype)


def _normal(out, mean, std, rng):
    z = normals(rng, out.shape, compute_dtype(out.dtype))
    return _moved(z, operand(std, out), operand(mean, out))


@lowers(aten.normal_functional.default, dynamic="mean std")
def normal_functional(out, x, mean=0.0, std=1.0, *, rng, generator=None):
    return cast(_normal(out, mean, std, rng), out.dtype)


@lowers(aten.normal.Tensor_float, aten.normal.float_Tensor, aten.normal.float_float, dynamic="mean std")
@lowers(aten.normal.Tensor_Tensor)
def normal(out, mean, std=1.0, size=None, *, rng, **_):
    return cast(_normal(out, mean, std, rng), out.dtype)


@lowers(aten.log_normal.default, dynamic="mean std")
def log_normal(out, x, mean=1.0, std=2.0, *, rng, generator=None):
    return cast(lax.exp(_normal(out, mean, std, rng)), out.dtype)


@lowers(aten.exponential.default, dynamic="lambd")
def exponential(out, x, lambd=1.0, *, rng, generator=None):
    u = open_uniforms(rng, out.shape, compute_dtype(out.dtype))
    return cast(-lax.log(u) / operand(lambd, out), out.dtype)


@lowers(aten.cauchy.default, dynamic="median sigma")
def cauchy(out, x, median=0.0, sigma=1.0, *, rng, generator=None):
    u = open_uniforms(rng, out.shape, compute_dtype(out.dtype))
    return cast(operand(median, out) + operand(sigma, out) * lax.tan(np.pi * (u - 0.5)), out.dtype)


@lowers(aten.geometric.default, dynamic="p")
def geometric(out, x, p, *, rng, generator=None):
    u = open_uniforms(rng, out.shape, jnp.float64 if out.dtype == jnp.float64 else jnp.float32)
    tries = jnp.ceil(lax.log(u) / lax.log1p(-cast(p, u.dtype)))
    return cast(jnp.maximum(tries, 1), out.dtype)


@lowers(aten.bernoulli.p, aten.bernoulli.Tensor, dynamic="p")
@lowers(aten.bernoulli.default)
def bernoulli(out, x, p=None, *, rng, generator=None):
    return cast(mask(rng, out.shape, x if p is None else p), out.dtype)


def integers(rng, shape, low, high):
    """Return uniform int64 numbers of [low, high); the ends may be arrays.

    A range below 2^32 takes the high word of a product, a larger one a remainder: both are biased by less than
    range / 2^32 or range / 2^64, as torch's own are.
    """
    if isinstance(low, int) and isinstance(high, int) and high - low < 1 << 32:
        wide = bits(rng, shape).astype(jnp.uint64) * np.uint64(high - low)
        return (wide >> np.uint64(32)).astype(jnp.int64) + np.int64(low)
    words = bits(rng, shape, jnp.uint64)
    if isinstance(low, int) and isinstance(high, int):
        span = np.uint64((high - low) % (1 << 64))
        return (words % span if span else words).astype(jnp.int64) + np.int64(low)
    low, high = cast(low, jnp.int64), cast(high, jnp.int64)
    return (words % (high - low).astype(jnp.uint64)).astype(jnp.int64) + low


@lowers(aten.randint.default, aten.randint.generator, dynamic="high")
def randint(out, high, size, *, rng, **_):
    return cast(integers(rng, out.shape, 0, high), out.dtype)


@lowers(aten.randint.low, aten.randint.low_generator, dynamic="low high")
def randint_low(out, low, high, size, *, rng, **_):
    return cast(integers(rng, out.shape, low, high), out.dtype)


@lowers(aten.random.to, dynamic="to")
@lowers(aten.randint_like.Tensor, aten.randint_like.Tensor_generator)
@lowers(aten.randint_like.default, aten.randint_like.generator, dynamic="high")
def randint_like(out, x, high, *, rng, **_):
    return cast(integers(rng, out.shape, 0, high), out.dtype)


@lowers(aten.randint_like.low_dtype, aten.randint_like.low_generator_dtype, dynamic="low high")
def randint_like_low(out, x, low, high, *, rng, **_):
    return cast(integers(rng, out.shape, low, high), out.dtype)


def _largest(dtype):
    """Return the largest integer ``Tensor.random_`` draws for ``dtype``: all below it are exact."""
    if is_floating(dtype):
        return 1 << (jnp.finfo(dtype).nmant + 1)
    return 1 if dtype == np.bool_ else min(int(jnp.iinfo(dtype).max), (1 << 63) - 1)


@lowers(aten.random.default)
def random(out, x, *, rng, generator=None):
    return cast(integers(rng, out.shape, 0, _largest(out.dtype) + 1), out.dtype)


@lowers(getattr(aten.random, "from"), dynamic="from to")
def random_from(out, x, low=0, to=None, *, rng, generator=None, **ends):
    low = ends.get("from", low)
    return cast(integers(rng, out.shape, low, _largest(out.dtype) + 1 if to is None else to), out.dtype)


@lowers(aten.randperm.default, aten.randperm.generator)
def randperm(out, n, *, rng, **_):
    drawn = bits(rng, out.shape, jnp.uint64)
    if target_platform() == "cpu":
        return cast(places_in_order(drawn, 0), out.dtype)
    return cast(lax.sort((drawn, lax.iota(jnp.int32, out.shape[0])), num_keys=1)[1], out.dtype)


@lowers(aten.multinomial.default)
def multinomial(out, weights, num_samples, replacement=False, *, rng, generator=None):
    weights = cast(weights, compute_dtype(weights.dtype))
    if not replacement:  # the order of exponential waiting times is a draw without replacement
        waits = lax.log(weights) - jnp.log(-lax.log(open_uniforms(rng, weights.shape, weights.dtype)))
        return cast(lax.top_k(waits, out.shape[-1])[1], out.dtype)
    cumulative = jnp.cumsum(weights, axis=-1)
    share = cumulative / cumulative[..., -1:]
    find = partial(jnp.searchsorted, side="right")
    for _ in out.shape[:-1]:
        find = jax.vmap(find)
    return cast(find(share, uniforms(rng, out.shape, weights.dtype)), out.dtype)


@lowers(aten.poisson.default)
def poisson(out, rate, generator=None, *, rng):
    rate = cast(rate, compute_dtype(rate.dtype))
    return cast(jax.random.poisson(_generator_key(rng), rate, out.shape, jnp.int64), out.dtype)


@lowers(aten.binomial.default)
def binomial(out, count, prob, generator=None, *, rng):
    count, prob = operands(out, count, prob)
    return cast(jax.random.binomial(_generator_key(rng), count, prob, out.shape, prob.dtype), out.dtype)


def _gamma(out, shape_parameter, rng):
    a = cast(shape_parameter, compute_dtype(out.dtype))
    return jnp.maximum(jax.random.gamma(_generator_key(rng), a, out.shape, a.dtype), jnp.finfo(a.dtype).tiny)


@lowers(aten._standard_gamma.default)
def standard_gamma(out, x, generator=None, *, rng):
    return cast(_gamma(out, x, rng), out.dtype)


@lowers(aten._standard_gamma_grad.default)
def standard_gamma_grad(out, x, sample):
    return cast(lax.random_gamma_grad(*operands(out, x, sample)), out.dtype)


@lowers(aten._sample_dirichlet.default)
def sample_dirichlet(out, concentration, generator=None, *, rng):
    sample = _gamma(out, concentration, rng)
    return cast(sample / jnp.sum(sample, axis=-1, keepdims=True), out.dtype)


@lowers(aten.rrelu_with_noise_functional.default)
def rrelu_with_noise(out, x, noise, lower=0.125, upper=1 / 3, training=False, generator=None, *, rng):
    wide = compute_dtype(x.dtype)
    lower, upper = cast(lower, wide), cast(upper, wide)
    slope = lower + uniforms(rng, x.shape, wide) * (upper - lower) if training else (lower + upper) / 2
    slope = jnp.where(cast(x, wide) <= 0, slope, jnp.ones((), wide))
    return cast(cast(x, wide) * slope, x.dtype), cast(slope, noise.dtype) if training else noise
