"""Torchvision's pooling of regions: roi_align, roi_pool and their position-sensitive forms, with their gradients.

How many points or pixels a region has may depend on its size, that is, on data; so the rules go through them in a
loop whose length is that of the largest region, and regions that have fewer sit the rest out.
"""

import jax.numpy as jnp
from jax import lax

from lazytpu.lowering.registry import lowers
from lazytpu.lowering.support.operands import compute_dtype, quotient


def _align(rois, scale, pooled, ratio, offset, least):
    """Return where the bins of each region lie: start, size of a bin and points in it, [K,1] each, of y and of x."""
    scale, found = jnp.asarray(scale, rois.dtype), []
    for low, high, n in ((2, 4, pooled[0]), (1, 3, pooled[1])):
        start = rois[:, low] * scale - offset
        size = rois[:, high] * scale - offset - start
        size = jnp.maximum(size, least) if least is not None else size
        points = (
            jnp.full(size.shape, ratio)
            if ratio > 0
            else jnp.maximum(jnp.ceil(quotient(size, jnp.full_like(size, n))), 0).astype(jnp.int64)
        )
        found.append(tuple(a[:, None] for a in (start, quotient(size, jnp.full_like(size, n)), points)))
    return found


def _corners(start, bin_size, points, point, n, size):
    """Return the two neighbours [K,n] of the ``point``-th point of each bin along one axis, and their weights."""
    at = start + jnp.arange(n, dtype=start.dtype) * bin_size
    at = at + (point[:, None] + jnp.asarray(0.5, at.dtype)) * bin_size / points.astype(at.dtype)
    inside = (at >= -1) & (at <= size)
    at = jnp.clip(at, 0, size - 1)
    low = jnp.floor(at)
    weight = at - low
    low = low.astype(jnp.int64)
    return (low, jnp.minimum(low + 1, size - 1)), (jnp.where(inside, 1 - weight, 0), jnp.where(inside, weight, 0))


def _each_point(rois, where, pooled, size, state, visit):
    """Call ``state = visit(state, y [K,ph,1], x [K,1,pw], weight [K,ph,pw])`` for each corner of each point."""
    (y0, dy, ny), (x0, dx, nx) = where
    count = jnp.maximum(ny * nx, 1)[:, 0]

    def body(k, state):
        iy, ix = k // jnp.maximum(nx, 1)[:, 0], k % jnp.maximum(nx, 1)[:, 0]
        on = jnp.where(k < (ny * nx)[:, 0], 1 / count.astype(rois.dtype), 0)
        ys, wys = _corners(y0, dy, ny, iy.astype(rois.dtype), pooled[0], size[0])
        xs, wxs = _corners(x0, dx, nx, ix.astype(rois.dtype), pooled[1], size[1])
        for y, wy in zip(ys, wys, strict=True):
            for x, wx in zip(xs, wxs, strict=True):
                weight = jnp.where(on > 0, on, 0)[:, None, None] * wy[:, :, None] * wx[:, None, :]
                state = visit(state, y[:, :, None], x[:, None, :], jnp.where(weight == 0, 0, weight))
        return state

    return lax.fori_loop(0, jnp.max(ny * nx, initial=0), body, state)


def _batch_of(rois):
    return rois[:, 0].astype(jnp.int64)[:, None, None]


def _where_aligned(rois, scale, pooled, ratio, aligned):
    return _align(rois, scale, pooled, ratio, 0.5 if aligned else 0.0, None if aligned else 1.0)


@lowers("torchvision.roi_align.default", dynamic="spatial_scale")
def roi_align(out, x, rois, spatial_scale, pooled_height, pooled_width, sampling_ratio, aligned):
    if 0 in out.shape or x.size == 0:
        return jnp.zeros(out.shape, out.dtype)
    dtype, pooled = compute_dtype(x.dtype), (pooled_height, pooled_width)
    planes, rois = jnp.moveaxis(x.astype(dtype), 1, -1), rois.astype(dtype)
    batch = _batch_of(rois)

    def visit(total, at_y, at_x, weight):
        return total + planes.at[batch, at_y, at_x].get(mode="clip") * weight[..., None]

    where = _where_aligned(rois, spatial_scale, pooled, sampling_ratio, aligned)
    total = jnp.zeros((rois.shape[0], *pooled, x.shape[1]), dtype)
    return jnp.moveaxis(_each_point(rois, where, pooled, x.shape[2:], total, visit), -1, 1).astype(out.dtype)


@lowers("torchvision._roi_align_backward.default", dynamic="spatial_scale")
def roi_align_backward(
    out, grad, rois, spatial_scale, pooled_height, pooled_width, n, channels, height, width, ratio, aligned
):
    if 0 in out.shape or grad.size == 0:
        return jnp.zeros(out.shape, out.dtype)
    dtype, pooled = compute_dtype(grad.dtype), (pooled_height, pooled_width)
    grad, rois = jnp.moveaxis(grad.astype(dtype), 1, -1), rois.astype(dtype)
    batch = _batch_of(rois)

    def visit(total, at_y, at_x, weight):
        return total.at[batch, at_y, at_x].add(grad * weight[..., None], mode="drop")

    where = _where_aligned(rois, spatial_scale, pooled, ratio, aligned)
    total = jnp.zeros((n, height, width, channels), dtype)
    return jnp.moveaxis(_each_point(rois, where, pooled, (height, width), total, visit), -1, 1).astype(out.dtype)


def _channel_of(out_channels, pooled):
    """Return the input channel of each output channel and bin, i32[c,ph,pw]: each bin has channels of its own."""
    n = out_channels * pooled[0] * pooled[1]
    return jnp.arange(n, dtype=jnp.int32).reshape(out_channels, *pooled)


def _position_sensitive(out, x, rois, pooled, pool):
    """Return the results of pooling with channels of its own for each bin: the values, and the channel of each.

    Args:
        pool: gives the values, of ``(rois, read, zeros)``; ``read(y, x)`` is what a place of the bins' channels holds.
    """
    values, _ = out
    channel = _channel_of(values.shape[1], pooled)
    mapping = jnp.broadcast_to(channel, values.shape)
    if 0 in values.shape or x.size == 0:
        return jnp.zeros(values.shape, values.dtype), mapping
    dtype = compute_dtype(x.dtype)
    planes, rois = x.astype(dtype), rois.astype(dtype)
    batch = _batch_of(rois)[:, None]

    def read(at_y, at_x):
        return planes.at[batch, channel[None], at_y[:, None], at_x[:, None]].get(mode="clip")

    return pool(rois, read, jnp.zeros(values.shape, dtype)).astype(values.dtype), mapping


@lowers("torchvision.ps_roi_align.default", dynamic="spatial_scale")
def ps_roi_align(out, x, rois, spatial_scale, pooled_height, pooled_width, sampling_ratio):
    pooled = pooled_height, pooled_width

    def pool(rois, read, zeros):
        where = _align(rois, spatial_scale, pooled, sampling_ratio, 0.5, None)

        def visit(total, at_y, at_x, weight):
            return total + read(at_y, at_x) * weight[:, None]

        return _each_point(rois, where, pooled, x.shape[2:], zeros, visit)

    return _position_sensitive(out, x, rois, pooled, pool)


@lowers("torchvision._ps_roi_align_backward.default", dynamic="spatial_scale")
def ps_roi_align_backward(
    out, grad, rois, mapping, spatial_scale, pooled_height, pooled_width, ratio, n, channels, height, width
):
    if 0 in out.shape or grad.size == 0:
        return jnp.zeros(out.shape, out.dtype)
    dtype, pooled = compute_dtype(grad.dtype), (pooled_height, pooled_width)
    grad, rois = grad.astype(dtype), rois.astype(dtype)
    batch = _batch_of(rois)[:, None]

    def visit(total, at_y, at_x, weight):
        return total.at[batch, mapping, at_y[:, None], at_x[:, None]].add(grad * weight[:, None], mode="drop")

    where = _align(rois, spatial_scale, pooled, ratio, 0.5, None)
    return _each_point(rois, where, pooled, (height, width), jnp.zeros(out.shape, dtype), visit).astype(out.dtype)


def _away_from_zero(x):
    return lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO)


def _pixels(start, size, n, limit):
    """Return first pixel and the one past the last [K,n] of each of ``n`` bins along one axis."""
    low, high = (jnp.arange(n, dtype=size.dtype) + k for k in (0, 1))
    bin_size = quotient(size, jnp.full_like(size, n))[:, None]
    low, high = jnp.floor(low * bin_size), jnp.ceil(high * bin_size)
    return tuple(jnp.clip(a + start[:, None], 0, limit).astype(jnp.int64) for a in (low, high))


def _each_pixel(ys, xs, state, visit):
    """Call ``state = visit(state, y [K,ph,1], x [K,1,pw], inside [K,ph,pw])`` for each pixel of the bins."""
    (y0, y1), (x0, x1) = ys, xs
    rows, columns = jnp.max(y1 - y0, initial=0), jnp.max(x1 - x0, initial=0)

    def body(k, state):
        y, x = y0 + k // columns, x0 + k % columns
        inside = (y < y1)[:, :, None] & (x < x1)[:, None, :]
        return visit(state, y[:, :, None], x[:, None, :], inside)

    return lax.fori_loop(0, jnp.maximum(rows, 0) * jnp.maximum(columns, 0), body, state)


@lowers("torchvision.roi_pool.default", dynamic="spatial_scale")
def roi_pool(out, x, rois, spatial_scale, pooled_height, pooled_width):
    values, places = out
    if 0 in values.shape or x.size == 0:
        return jnp.zeros(values.shape, values.dtype), jnp.zeros(places.shape, places.dtype)
    dtype, (height, width) = compute_dtype(x.dtype), x.shape[2:]
    planes, rois = jnp.moveaxis(x.astype(dtype), 1, -1), rois.astype(dtype)
    batch = _batch_of(rois)
    corner = _away_from_zero(rois[:, 1:] * jnp.asarray(spatial_scale, dtype))
    sizes = [jnp.maximum(corner[:, 2 + k] - corner[:, k] + 1, 1) for k in (0, 1)]
    ys = _pixels(corner[:, 1], sizes[1], pooled_height, height)
    xs = _pixels(corner[:, 0], sizes[0], pooled_width, width)

    def visit(state, y, x, inside):
        best, at = state
        value = planes.at[batch, y, x].get(mode="clip")
        better = inside[..., None] & (value > best)
        return jnp.where(better, value, best), jnp.where(better, (y * width + x)[..., None], at)

    shape = (rois.shape[0], pooled_height, pooled_width, x.shape[1])
    start = jnp.full(shape, jnp.finfo(dtype).min, dtype), jnp.full(shape, -1, jnp.int64)
    best, at = _each_pixel(ys, xs, start, visit)
    empty = (ys[1] <= ys[0])[:, :, None] | (xs[1] <= xs[0])[:, None, :]
    best = jnp.where(empty[..., None], 0, best)
    return jnp.moveaxis(best, -1, 1).astype(values.dtype), jnp.moveaxis(at, -1, 1).astype(places.dtype)


@lowers("torchvision._roi_pool_backward.default")
def roi_pool_backward(out, grad, rois, argmax, scale, pooled_height, pooled_width, n, channels, height, width):
    batch = rois[:, 0].astype(jnp.int64)[:, None, None, None]
    channel = jnp.arange(channels)[:, None, None]
    at = jnp.where(argmax < 0, height * width, argmax)  # an empty bin; past the end, so it is dropped
    total = jnp.zeros((n, channels, height * width), compute_dtype(grad.dtype))
    total = total.at[batch, channel, at].add(grad.astype(total.dtype), mode="drop")
    return total.reshape(out.shape).astype(out.dtype)


def _position_bins(rois, scale, pooled, size):
    """Return the pixels of the bins of ps_roi_pool."""
    scale, found = jnp.asarray(scale, rois.dtype), []
    for low, high, n, limit in ((2, 4, pooled[0], size[0]), (1, 3, pooled[1], size[1])):
        start = _away_from_zero(rois[:, low] * scale)
        length = jnp.maximum(_away_from_zero(rois[:, high] * scale) - start, 1)
        found.append(_pixels(start, length, n, limit))
    return found


def _mean_weight(ys, xs, dtype):
    area = (ys[1] - ys[0])[:, :, None] * (xs[1] - xs[0])[:, None, :]
    return jnp.where(area > 0, 1 / jnp.maximum(area, 1).astype(dtype), 0)[:, None]


@lowers("torchvision.ps_roi_pool.default", dynamic="spatial_scale")
def ps_roi_pool(out, x, rois, spatial_scale, pooled_height, pooled_width):
    pooled = pooled_height, pooled_width

    def pool(rois, read, zeros):
        # Torchvision leaves out the last row and column here, though not in the gradient.
        ys, xs = _position_bins(rois, spatial_scale, pooled, [n - 1 for n in x.shape[2:]])

        def visit(total, at_y, at_x, inside):
            return total + jnp.where(inside[:, None], read(at_y, at_x), 0)

        return _each_pixel(ys, xs, zeros, visit) * _mean_weight(ys, xs, zeros.dtype)

    return _position_sensitive(out, x, rois, pooled, pool)


@lowers("torchvision._ps_roi_pool_backward.default", dynamic="spatial_scale")
def ps_roi_pool_backward(
    out, grad, rois, mapping, spatial_scale, pooled_height, pooled_width, n, channels, height, width
):
    if 0 in out.shape or grad.size == 0:
        return jnp.zeros(out.shape, out.dtype)
    dtype = compute_dtype(grad.dtype)
    rois = rois.astype(dtype)
    batch = _batch_of(rois)[:, None]
    ys, xs = _position_bins(rois, spatial_scale, (pooled_height, pooled_width), (height, width))
    share = grad.astype(dtype) * _mean_weight(ys, xs, dtype)

    def visit(total, at_y, at_x, inside):
        value = jnp.where(inside[:, None], share, 0)
        return total.at[batch, mapping, at_y[:, None], at_x[:, None]].add(value, mode="drop")

    return _each_pixel(ys, xs, jnp.zeros(out.shape, dtype), visit).astype(out.dtype)
