"""Sampling an image or a volume at the points of a grid.

Coordinates of a grid run from -1 to 1, width first.  The gradient is that of the formulas below, which
are written so that it is torch's also where they bend: zero at and beyond a clipped border.  The CPU rounds
half precision after each operation, coordinates too, and computes an image and a volume by different formulas;
both decide which element is read.
"""

import itertools
import math
from functools import partial, reduce

import jax
import jax.numpy as jnp
import torch
from jax import lax

from lazytpu.lowering.registry import lowers
from lazytpu.lowering.support.operands import compute_dtype, rounded, rounded_as_is

aten = torch.ops.aten

BILINEAR, NEAREST, BICUBIC = 0, 1, 2
ZEROS, BORDER, REFLECTION = 0, 1, 2
A = -0.75  # of the bicubic kernel
_POINTS_TOGETHER = 16  # by the CPU, of an image in half precision


def _unnormalized(x, size, align_corners, volume, r):
    """Return the coordinate in elements; ``r`` rounds to the dtype of the tensors, as everywhere below."""
    x = r(x + 1)
    if volume:
        if not align_corners:
            return r(rounded_as_is(r(x * _number(size, r))) - 1) / 2
        return rounded_as_is(r(x / 2 * _number(size - 1, r)))
    x = rounded_as_is(r(x * _number((size - align_corners) / 2, r)))  # else far points have no whole part
    return x if align_corners else r(x - 0.5)


def _number(x, r):
    return r(jnp.asarray(x, jnp.float32)) if r is not _exact else x


def _exact(x):
    return x


def _clipped(x, size, volume):
    x = jnp.where(x <= 0, 0, jnp.where(x >= size - 1, size - 1, x))
    return jnp.where(jnp.isnan(x), size - 1 if volume else 0, x)


def _reflected(x, size, align_corners, volume, r):
    """Mirrored at the first and last element, or with ``align_corners`` off at their outer edges."""
    low, span = (0.0, size - 1) if align_corners else (-0.5, size)
    if span == 0:
        return jnp.zeros_like(x)
    x = r(x - low)
    x = jnp.where(x < 0, -x, x)
    period = _number(span if volume else 2 * span, r)
    periods = lax.stop_gradient(jnp.floor(r(x / period)))
    rest = r(x - rounded_as_is(r(periods * period)))
    other = r(period - rest)
    return r((jnp.where(periods % 2 == 0, rest, other) if volume else jnp.where(rest > other, other, rest)) + low)


def _padded(x, size, padding, align_corners, volume, r):
    if padding == REFLECTION:
        x = _reflected(x, size, align_corners, volume, r)
    return x if padding == ZEROS else _clipped(x, size, volume)


def _elements(x):
    """Take the elements of ``x`` [batch, channel, *spatial] at flat indices [batch, 1, point]."""
    flat = x.reshape(*x.shape[:2], -1)
    return lambda at: jnp.take_along_axis(flat, at, 2, mode="clip")


def _read(elements, spatial, coordinates, r):
    """Return what ``elements`` has at whole ``coordinates``, zero off the image; which of them are on it."""
    inside, at = True, 0
    for x, size in zip(coordinates, spatial, strict=True):
        inside = inside & (x >= 0) & (x <= size - 1)
        at = at * size + jnp.clip(jnp.nan_to_num(x), 0, size - 1).astype(jnp.int32)
    return r(jnp.where(inside, elements(at), 0)), inside  # the rounding is of the gradient's


def _sum(terms, r):
    return reduce(lambda a, b: r(a + b), terms)


def _cubic(t, r):
    """Return the weights of the four elements about a point that is ``t`` right of the second."""

    def near(x):
        return r(r(r(r(r((A + 2) * x) - (A + 3)) * x) * x) + 1)

    def far(x):
        return r(r(r(r(r(r(A * x) - 5 * A) * x) + 8 * A) * x) - 4 * A)

    return far(r(t + 1)), near(t), near(r(1 - t)), far(r(2 - t))


def _cubic_slopes(t, r):
    """Return the derivatives of these weights by ``t``."""

    def near(x):
        return r(r(r(3 * (A + 2) * x) - 2 * (A + 3)) * x)

    def far(x):
        return r(r(r(r(3 * A * x) - 10 * A) * x) + 8 * A)

    return far(r(t + 1)), near(t), -near(r(1 - t)), -far(r(2 - t))


def _points(grid, spatial, mode, padding, align_corners, r):
    """Return the coordinate of each point in each dimension, in elements."""
    volume, found = len(spatial) == 3, []
    for i, size in enumerate(spatial):
        p = _unnormalized(grid[..., -1 - i].reshape(len(grid), 1, -1), size, align_corners, volume, r)
        found.append(p if mode == BICUBIC else _padded(p, size, padding, align_corners, volume, r))
    return found


def _corners(elements, spatial, points, r):
    """Of each element about each point: the weights by dimension, the value, and whether it is on the image."""
    volume, low = len(spatial) == 3, [lax.stop_gradient(jnp.floor(p)) for p in points]
    right = [r(p - f) for p, f in zip(points, low, strict=True)]
    left = [r(f + 1 - p) if volume else r(1 - t) for p, f, t in zip(points, low, right, strict=True)]
    for corner in itertools.product((0, 1), repeat=len(spatial)):
        sides = [(right if o else left)[i] for i, o in enumerate(corner)]
        values, inside = _read(elements, spatial, [f + o for f, o in zip(low, corner, strict=True)], r)
        yield corner, sides, values, inside


def _sixteen(elements, spatial, points, padding, align_corners, r):
    """Return the elements about each point of an image, by row and column, and where in its cell the point is."""
    low = [lax.stop_gradient(jnp.floor(p)) for p in points]

    def read(*offsets):
        places = [r(f + o) for f, o in zip(low, offsets, strict=True)]
        places = [_padded(p, size, padding, align_corners, False, r) for p, size in zip(places, spatial, strict=True)]
        return _read(elements, spatial, [jnp.trunc(p) for p in places], r)[0]

    values = [[read(i, j) for j in range(-1, 3)] for i in range(-1, 3)]
    return values, [r(p - f) for p, f in zip(points, low, strict=True)]


def _sample(elements, spatial, grid, mode, padding, align_corners, r):
    """Return what ``elements`` has at ``grid`` [batch, *points, dimension], as [batch, channel, point]."""
    points = _points(grid, spatial, mode, padding, align_corners, r)
    if mode == NEAREST:
        if len(spatial) == 2 and r is not _exact:  # what C makes of NaN and infinity as an integer of 32 bits
            points = [jnp.where(jnp.isfinite(p), p, 0) for p in points]
        total, _ = _read(elements, spatial, [jnp.round(p) for p in points], r)
    elif mode == BICUBIC:
        values, (down, across) = _sixteen(elements, spatial, points, padding, align_corners, r)
        rows = [_dot(_cubic(across, r), row, r) for row in values]
        total = _dot(_cubic(down, r), rows, r)
    else:
        terms = []
        for _, sides, values, inside in _corners(elements, spatial, points, r):
            term = r(values * reduce(lambda a, b: r(a * b), reversed(sides)))
            terms.append(term if len(spatial) == 2 else jnp.where(inside, term, 0))  # off a volume not even NaN counts
        total = _sum(terms, r)
    return total


def _dot(weights, values, r):
    return _sum([r(w * v) for w, v in zip(weights, values, strict=True)], r)


def _slopes(grad, x, points, mode, padding, align_corners, r):
    """Return for each dimension the terms by channel whose sum is the gradient of the coordinates."""
    spatial, elements, grad = x.shape[2:], _elements(x), grad.reshape(*x.shape[:2], -1)
    if mode == BICUBIC:
        values, (down, across) = _sixteen(elements, spatial, points, padding, align_corners, r)
        weights, slopes = (_cubic(down, r), _cubic(across, r)), (_cubic_slopes(down, r), _cubic_slopes(across, r))
        pairs = [(j, i, r(values[j][i] * grad)) for i in range(4) for j in range(4)]
        return (
            [r(r(v * slopes[0][j]) * weights[1][i]) for j, i, v in pairs],
            [r(r(v * slopes[1][i]) * weights[0][j]) for j, i, v in pairs],
        )
    corners = list(_corners(elements, spatial, points, r))
    if len(spatial) == 3:
        terms = [[], [], []]
        for corner, sides, values, inside in corners:
            for i in range(3):
                others = [sides[k] for k in (2, 1, 0) if k != i]
                term = r(reduce(lambda a, b: r(a * b), others, values) * grad)
                terms[i].append(jnp.where(inside, term if corner[i] else -term, 0))
        return terms
    (_, (s, e), nw, _), (_, (_, w), ne, _), (_, (n, _), sw, _), (_, _, se, _) = corners
    return (
        [r(r(r(r(sw - nw) * e) + r(r(se - ne) * w)) * grad)],
        [r(r(r(r(ne - nw) * s) + r(r(se - sw) * n)) * grad)],
    )


def _added(terms, r):
    """Return the sum of ``terms`` [batch, channel, point] over the channels, rounded as often as the CPU does."""
    if r is _exact:
        return sum(terms).sum(1, keepdims=True)
    by_channel = jnp.moveaxis(jnp.stack(terms), 2, 0)
    start = jnp.zeros_like(by_channel[0, 0])
    return lax.scan(lambda total, some: (_sum([total, *some], r), None), start, by_channel)[0][:, None]


def _rounding(dtype):
    return _exact if compute_dtype(dtype) == dtype else partial(rounded, dtype=dtype)


@lowers(aten.grid_sampler_2d.default, aten.grid_sampler_3d.default, aten._grid_sampler_2d_cpu_fallback.default)
def grid_sampler(out, x, grid, interpolation_mode, padding_mode, align_corners):
    if 0 in out.shape:
        return jnp.zeros(out.shape, out.dtype)
    dtype, r = compute_dtype(x.dtype), _rounding(x.dtype)
    how = interpolation_mode, padding_mode, align_corners, r
    y = _sample(_elements(x.astype(dtype)), x.shape[2:], grid.astype(dtype), *how)
    return y.astype(out.dtype).reshape(out.shape)


def _by_element(elements, spatial, grid, mode, padding, align_corners, r):
    """Return the bicubic sample as the CPU's gradient has it: each element times the weights of row, then column."""
    points = _points(grid, spatial, mode, padding, align_corners, r)
    values, (down, across) = _sixteen(elements, spatial, points, padding, align_corners, r)
    rows, columns = _cubic(down, r), _cubic(across, r)
    return sum(r(r(values[j][i] * rows[j]) * columns[i]) for j in range(4) for i in range(4))


def _gradient_of_x(out, grad, grid, mode, *how):
    """Return the gradient of the input, added up point by point in the CPU's order: it rounds after each addition.

    For images it takes as many points together as a vector holds, the first element of all before the second.
    """
    spatial, grad = out.shape[2:], grad.reshape(*out.shape[:2], -1)
    reads, points = {NEAREST: 1, BICUBIC: 16}.get(mode, 2 ** len(spatial)), grad.shape[2]
    sampled, places = _by_element if mode == BICUBIC else _sample, []

    def sample(values):
        values = iter(values)

        def elements(at):
            places.append(at)
            return next(values)

        return sampled(elements, spatial, grid, mode, *how)

    _, pull = jax.vjp(sample, [jnp.zeros_like(grad)] * reads)
    given, at = jnp.stack(pull(grad)[0], 2), jnp.stack(places, 2)  # [batch, channel, read, point]
    together, size = _POINTS_TOGETHER if len(spatial) == 2 else 1, math.prod(spatial)
    if mode == BICUBIC:  # column by column
        given, at = (jnp.swapaxes(x.reshape(*x.shape[:2], 4, 4, -1), 2, 3).reshape(x.shape) for x in (given, at))

    def in_order(x, fill):
        x = lax.pad(x, jnp.asarray(fill, x.dtype), [(0, 0, 0)] * 3 + [(0, -points % together, 0)])
        return jnp.swapaxes(x.reshape(*x.shape[:3], -1, together), 2, 3).reshape(*x.shape[:2], -1)

    given, at = in_order(given, 0), in_order(at, size)
    flat = jnp.zeros((*out.shape[:2], size), out.dtype)
    add = jax.vmap(lambda flat, at, given: flat.at[:, at[0]].add(given.astype(out.dtype), mode="drop"))
    return add(flat, at, given).reshape(out.shape)


@lowers(aten.grid_sampler_2d_backward.default, aten.grid_sampler_3d_backward.default)
def grid_sampler_backward(
    out, grad, x, grid, interpolation_mode, padding_mode, align_corners, output_mask=(True, True)
):
    if 0 in grad.shape:
        return jnp.zeros_like(x) if output_mask[0] else None, jnp.zeros_like(grid)
    dtype, r = compute_dtype(x.dtype), _rounding(x.dtype)

    how = interpolation_mode, padding_mode, align_corners, r
    x, grid, grad = x.astype(dtype), grid.astype(dtype), grad.astype(dtype)
    of_x = None
    if output_mask[0]:
        of_x = _gradient_of_x(out[0], grad, grid, *how)
    if interpolation_mode == NEAREST:
        return of_x, jnp.zeros(out[1].shape, out[1].dtype)
    points, pull = jax.vjp(lambda grid: _points(grid, x.shape[2:], *how), grid)
    (of_grid,) = pull([_added(terms, r) for terms in _slopes(grad, x, points, *how)])
    return of_x, of_grid.astype(out[1].dtype)


lowers(aten._grid_sampler_2d_cpu_fallback_backward.default)(grid_sampler_backward)
