"""Histograms with a number of bins that is known while lowering."""

from __future__ import annotations

import math

import jax.numpy as jnp
import torch

from lazytpu.lowering.registry import lowers
from lazytpu.lowering.rules.indexing import write
from lazytpu.lowering.rules.sorting import lower_bound
from lazytpu.lowering.support.operands import compute_dtype, rounded

aten = torch.ops.aten


@lowers(aten.bincount.default)
def bincount(out, x, weights=None, minlength=0):
    counts = jnp.ones((), out.dtype) if weights is None else weights
    return write(jnp.zeros(out.shape, out.dtype), [0], [x], counts, "sum")


def _in_steps(x, low, high, bins):
    """Return where ``x`` lies between ``low`` and ``high``, in bins; half precision is rounded after each operation."""
    dtype, wide = x.dtype, compute_dtype(x.dtype)
    if jnp.issubdtype(dtype, jnp.integer):  # CUDA's alone
        x, low, high = (a.astype(jnp.int64) for a in (x, low, high))
        return (x - low) * bins // (high - low)
    x, low, high, bins = (jnp.asarray(a, dtype).astype(wide) for a in (x, low, high, bins))
    part = rounded(rounded(x - low, dtype) * bins, dtype)
    return rounded(part / rounded(high - low, dtype), dtype)


@lowers(aten.histc.default)
def histc(out, x, bins=100, min=0, max=0):
    zeros = jnp.zeros(out.shape, out.dtype)
    if x.size == 0:
        return zeros
    x = x.reshape(-1)
    low, high = (jnp.asarray(a).astype(x.dtype) for a in (min, max))
    low, high = jnp.where(low == high, x.min(), low), jnp.where(low == high, x.max(), high)
    low, high = jnp.where(low == high, low - 1, low), jnp.where(low == high, high + 1, high)
    at = _in_steps(x, low, high, bins).astype(jnp.int64)
    at = jnp.where((x >= low) & (x <= high), jnp.minimum(at, bins - 1), bins)
    return write(zeros, [0], [at], jnp.ones((), out.dtype), "sum")


def _counted(out, x, edges, weight, density):
    """Return the histogram of points ``[n, d]`` over ``d`` rows of bin edges, the last edge included."""
    shape, place, inside = tuple(e.shape[0] - 1 for e in edges), 0, True
    for column, edge in zip(x.T, edges, strict=True):
        bin_ = lower_bound(edge, column, right=True) - 1
        place = place * (edge.shape[0] - 1) + jnp.where(column == edge[-1], edge.shape[0] - 2, bin_)
        inside &= (column >= edge[0]) & (column <= edge[-1])
    place = jnp.where(inside, place, math.prod(shape))
    counts = jnp.ones((), out.dtype) if weight is None else weight.reshape(-1)
    hist = write(jnp.zeros(math.prod(shape), out.dtype), [0], [place], counts, "sum").reshape(shape)
    if density:
        hist = hist / jnp.sum(hist)
        for d, edge in enumerate(edges):
            hist = hist / jnp.diff(edge).reshape([-1 if i == d else 1 for i in range(len(edges))])
    return hist


def _edges(columns, bins, limits, dtype):
    """Return evenly spaced bin edges: between given limits, or the extremes of the data."""
    edges = []
    for d, (column, n) in enumerate(zip(columns, bins, strict=True)):
        if limits is not None:
            low, high = (jnp.asarray(a, dtype) for a in limits[2 * d : 2 * d + 2])
        elif column.size:
            low, high = column.min(), column.max()
        else:
            low, high = jnp.zeros((), dtype), jnp.ones((), dtype)
        flat = low == high
        low, high = jnp.where(flat, low - 0.5, low), jnp.where(flat, high + 0.5, high)
        edges.append(jnp.linspace(low, high, n + 1, dtype=dtype))
    return edges


def _points(x):
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


@lowers(aten.histogram.bin_ct)
def histogram(out, x, bins=100, *, range=None, weight=None, density=False):
    edges = _edges([x.reshape(-1)], [bins], range, x.dtype)
    return _counted(out[0], x.reshape(-1, 1), edges, weight, density), edges[0]


@lowers(aten.histogram.bins_tensor)
def histogram_between(out, x, bins, *, weight=None, density=False):
    return _counted(out[0], x.reshape(-1, 1), [bins], weight, density), bins


@lowers(aten._histogramdd_bin_edges.default)
def histogramdd_bin_edges(out, x, bins, *, range=None, weight=None, density=False):
    return _edges(_points(x).T, bins, range, x.dtype)


@lowers(aten._histogramdd_from_bin_cts.default)
def histogramdd_from_bin_cts(out, x, bins, *, range=None, weight=None, density=False):
    x = _points(x)
    return _counted(out, x, _edges(x.T, bins, range, x.dtype), weight, density)


@lowers(aten._histogramdd_from_bin_tensors.default)
def histogramdd_from_bin_tensors(out, x, bins, *, weight=None, density=False):
    return _counted(out, _points(x), bins, weight, density)
