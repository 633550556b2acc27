"""Fourier transforms.  torch's fft, stft and istft all reach these three ops."""

import math

import jax.numpy as jnp
import torch
from jax import lax

from lazytpu.lowering.registry import lowers
from lazytpu.lowering.support.operands import compute_dtype

aten = torch.ops.aten

_MOST_DIMS = 3  # of one XLA FFT


def _scaled(x, normalization, size):
    """Return ``x`` divided by nothing, the root of the size of the transform, or the size: torch's 0, 1, 2."""
    if normalization == 0:
        return x
    factor = 1 / math.sqrt(size) if normalization == 1 else 1 / size
    return x * jnp.asarray(factor, x.real.dtype)


def _last(x, dims, transform):
    """Return ``transform`` applied with ``dims`` moved to the end, in their order."""
    places = range(x.ndim - len(dims), x.ndim)
    return jnp.moveaxis(transform(jnp.moveaxis(x, dims, places)), places, dims)


def _complex(x, dims, forward):
    """Return the transform of a complex array over all of ``dims``, without any factor."""
    for start in range(0, len(dims), _MOST_DIMS):
        part = tuple(dims[start : start + _MOST_DIMS])
        lengths = tuple(x.shape[d] for d in part)
        kind = lax.FftType.FFT if forward else lax.FftType.IFFT
        x = _last(x, part, lambda y, kind=kind, lengths=lengths: lax.fft(y, kind, lengths))
        if not forward:  # XLA divides by the size
            x = x * jnp.asarray(math.prod(lengths), x.real.dtype)
    return x


def _size(shape, dims):
    """Return how many elements each transform has."""
    return math.prod(shape[d] for d in dims)


def _positive(dims, ndim):
    """Return ``dims`` counted from the front."""
    return [d % ndim for d in dims]


@lowers(aten._fft_c2c.default)
def fft_c2c(out, x, dim, normalization, forward):
    if x.size == 0 or not dim:
        return x
    dims = _positive(dim, x.ndim)
    return _scaled(_complex(x, dims, forward), normalization, _size(x.shape, dims))


@lowers(aten._fft_r2c.default)
def fft_r2c(out, x, dim, normalization, onesided):
    if x.size == 0:
        return jnp.zeros(out.shape, out.dtype)
    x = x.astype(compute_dtype(x.dtype))  # XLA has no transform of float16
    dims = _positive(dim, x.ndim)
    last = dims[-1]
    length = x.shape[last]
    result = _last(x, (last,), lambda y: lax.fft(y, lax.FftType.RFFT, (length,)))
    result = _complex(result, dims[:-1], True)
    if not onesided:
        result = jnp.concatenate([result, _mirrored(result, dims, length)], last)
    return _scaled(result, normalization, _size(x.shape, dims))


def _mirrored(half, dims, length):
    """Return the frequencies a one-sided transform leaves out: conjugates of those at the negated place."""
    last = dims[-1]
    rest = lax.slice_in_dim(half, 1, (length + 1) // 2, axis=last)
    rest = lax.rev(rest, (last,))
    for d in dims[:-1]:
        rest = jnp.roll(lax.rev(rest, (d,)), 1, d)
    return lax.conj(rest)


@lowers(aten._fft_c2r.default)
def fft_c2r(out, x, dim, normalization, last_dim_size):
    if x.size == 0 or 0 in out.shape:
        return jnp.zeros(out.shape, out.dtype)
    dims = _positive(dim, x.ndim)
    x = _complex(x, dims[:-1], False)
    last = dims[-1]
    needed = last_dim_size // 2 + 1
    x = lax.slice_in_dim(x, 0, min(needed, x.shape[last]), axis=last)
    if x.shape[last] < needed:
        x = jnp.pad(x, [(0, needed - x.shape[d] if d == last else 0) for d in range(x.ndim)])
    result = _last(x, (last,), lambda y: lax.fft(y, lax.FftType.IRFFT, (last_dim_size,)))
    result = result * jnp.asarray(last_dim_size, result.dtype)
    return _scaled(result, normalization, _size(out.shape, dims)).astype(out.dtype)  # float16 of complex32


@lowers(aten.fft_fftfreq.default)
def fft_fftfreq(out, n, d=1.0, **_):
    return jnp.fft.fftfreq(n, d, dtype=out.dtype) if n else jnp.zeros(0, out.dtype)


@lowers(aten.fft_rfftfreq.default)
def fft_rfftfreq(out, n, d=1.0, **_):
    return jnp.fft.rfftfreq(n, d, dtype=out.dtype) if n else jnp.zeros(out.shape, out.dtype)
