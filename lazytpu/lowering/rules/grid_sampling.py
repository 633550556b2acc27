"""Sampling an image or a volume at the points of a grid.

Coordinates of a grid run from -1 to 1, width first.  The gradient is that of the formulas below, which
are written so that it is torch's also where they bend: zero at and beyond a clipped border.
"""

import itertools

import jax
import jax.numpy as jnp
import torch

from lazytpu.lowering.registry import lowers
from lazytpu.lowering.rules.operands import compute_dtype
from lazytpu.lowering.rules.upsampling import cubic

aten = torch.ops.aten

BILINEAR, NEAREST, BICUBIC = 0, 1, 2
ZEROS, BORDER, REFLECTION = 0, 1, 2


def _unnormalized(x, size, align_corners):
    return (x + 1) / 2 * (size - 1) if align_corners else ((x + 1) * size - 1) / 2


def _clipped(x, size):
    return jnp.where(x <= 0, 0, jnp.where(x >= size - 1, size - 1, x))


def _reflected(x, size, align_corners):
    """Mirrored at the first and last element, or with ``align_corners`` off at their outer edges."""
    low, span = (0.0, size - 1) if align_corners else (-0.5, size)
    if span == 0:
        return jnp.zeros_like(x)
    x = x - low
    x = jnp.where(x < 0, -x, x)
    rest = x - span * jnp.floor(x / span)
    return jnp.where(jnp.floor(x / span) % 2 == 0, rest, span - rest) + low


def _padded(x, size, padding, align_corners):
    if padding == REFLECTION:
        x = _reflected(x, size, align_corners)
    return x if padding == ZEROS else _clipped(x, size)


def _read(flat, spatial, coordinates):
    """Elements of ``flat`` [batch, channel, element] at whole ``coordinates``; zero off the image."""
    inside, at = True, 0
    for x, size in zip(coordinates, spatial, strict=True):
        inside = inside & (x >= 0) & (x <= size - 1)
        at = at * size + jnp.clip(jnp.nan_to_num(x), 0, size - 1).astype(jnp.int32)
    values = jnp.take_along_axis(flat, at.reshape(len(flat), 1, -1), 2, mode="clip")
    return jnp.where(inside.reshape(len(flat), 1, -1), values, 0)


def _sample(x, grid, mode, padding, align_corners):
    """``x`` [batch, channel, *spatial] at ``grid`` [batch, *points, dimension]."""
    spatial, flat = x.shape[2:], x.reshape(*x.shape[:2], -1)
    points = [_unnormalized(grid[..., -1 - i], size, align_corners) for i, size in enumerate(spatial)]
    if mode != BICUBIC:
        points = [_padded(p, size, padding, align_corners) for p, size in zip(points, spatial, strict=True)]
    if mode == NEAREST:
        y = _read(flat, spatial, [jnp.round(p) for p in points])
        return y.reshape(*x.shape[:2], *grid.shape[1:-1])
    offsets = (-1, 0, 1, 2) if mode == BICUBIC else (0, 1)
    low = [jax.lax.stop_gradient(jnp.floor(p)) for p in points]
    total = 0
    for corner in itertools.product(offsets, repeat=len(spatial)):
        places, weight = [], 1
        for p, f, o, size in zip(points, low, corner, spatial, strict=True):
            distance = jnp.where(o > 0, f + o - p, p - f - o)
            weight = weight * (cubic(distance, -0.75) if mode == BICUBIC else 1 - distance)
            places.append(_padded(f + o, size, padding, align_corners) if mode == BICUBIC else f + o)
        # Reflecting a whole number at a half can leave it a rounding error away from whole.
        total = total + _read(flat, spatial, [jnp.round(q) for q in places]) * weight.reshape(len(flat), 1, -1)
    return total.reshape(*x.shape[:2], *grid.shape[1:-1])


@lowers(aten.grid_sampler_2d.default, aten.grid_sampler_3d.default, aten._grid_sampler_2d_cpu_fallback.default)
def grid_sampler(out, x, grid, interpolation_mode, padding_mode, align_corners):
    if 0 in out.shape:
        return jnp.zeros(out.shape, out.dtype)
    dtype = compute_dtype(x.dtype)
    y = _sample(x.astype(dtype), grid.astype(dtype), interpolation_mode, padding_mode, align_corners)
    return y.astype(out.dtype)


@lowers(aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default)
def grid_sampler_backward(
    out, grad, x, grid, interpolation_mode, padding_mode, align_corners, output_mask=(True, True)
):
    if 0 in grad.shape:
        return jnp.zeros_like(x) if output_mask[0] else None, jnp.zeros_like(grid)
    dtype = compute_dtype(x.dtype)

    def sample(x, grid):
        return _sample(x, grid, interpolation_mode, padding_mode, align_corners)

    _, pull = jax.vjp(sample, x.astype(dtype), grid.astype(dtype))
    of_x, of_grid = pull(grad.astype(dtype))
    return of_x.astype(out[0].dtype) if output_mask[0] else None, of_grid.astype(out[1].dtype)


lowers(aten._grid_sampler_2d_cpu_fallback_backward.default)(grid_sampler_backward)
