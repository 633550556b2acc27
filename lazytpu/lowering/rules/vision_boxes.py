"""Torchvision's non-maximum suppression, as the op ``lazytpu::nms`` whose results have fixed sizes.

Boxes are taken in the order of their scores, a block at a time, so that no more than a block of the matrix of
overlaps is there at once.  Within a block, which boxes stay is the one solution of "a box stays if none that stays
before it overlaps it"; it is found by repeating that rule until nothing changes, in as many rounds as the longest
chain of boxes that decide about each other.
"""

import jax.numpy as jnp
import torch
from jax import lax

from lazytpu.lowering.registry import lowers
from lazytpu.lowering.rules.sorting import sorted_pair

library = torch.library.Library("lazytpu", "FRAGMENT")
library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> (Tensor kept, Tensor count)")

_BLOCK = 512


def _types(dets, scores, iou_threshold):
    """Check the arguments as torchvision does."""
    torch._check(dets.dim() == 2, lambda: f"boxes should be a 2d tensor, got {dets.dim()}D")
    torch._check(dets.size(1) == 4, lambda: f"boxes should have 4 elements in dimension 1, got {dets.size(1)}")
    torch._check(scores.dim() == 1, lambda: f"scores should be a 1d tensor, got {scores.dim()}D")
    torch._check(
        dets.size(0) == scores.size(0),
        lambda: (
            "boxes and scores should have same number of elements in dimension 0, "
            f"got {dets.size(0)} and {scores.size(0)}"
        ),
    )
    torch._check(dets.dtype == scores.dtype, lambda: "dets should have the same type as scores")
    return scores.new_empty(scores.shape, dtype=torch.int64), scores.new_empty((), dtype=torch.int64)


library.impl("nms", _types, "Meta")


def _overlap(a, b):
    """Return the intersection over union of boxes a [M,4] and b [N,4]."""
    area_a, area_b = ((x[:, 2] - x[:, 0]) * (x[:, 3] - x[:, 1]) for x in (a, b))
    low = jnp.maximum(a[:, None, :2], b[None, :, :2])
    high = jnp.minimum(a[:, None, 2:], b[None, :, 2:])
    sides = jnp.maximum(high - low, 0)
    shared = sides[..., 0] * sides[..., 1]
    return shared / (area_a[:, None] + area_b[None] - shared)


def _kept(boxes, threshold):
    """Return which of the boxes, best first, stay."""
    n = boxes.shape[0]
    size = min(_BLOCK, n)
    blocks = -(-n // size)
    boxes = jnp.pad(boxes, ((0, blocks * size - n), (0, 0)))
    place = jnp.arange(blocks * size)

    def block(k, kept):
        start = k * size
        mine = lax.dynamic_slice_in_dim(boxes, start, size)
        over = _overlap(mine, boxes).astype(jnp.float64) > threshold
        over &= place[None] > (start + jnp.arange(size))[:, None]
        inner = lax.dynamic_slice_in_dim(over, start, size, axis=1)
        free = lax.dynamic_slice_in_dim(kept, start, size)

        def settle(state):
            now, _ = state
            new = free & ~jnp.any(inner & now[:, None], axis=0)
            return new, jnp.any(new != now)

        stay, _ = lax.while_loop(lambda state: state[1], settle, (free, jnp.bool_(True)))
        kept = kept & ~jnp.any(over & stay[:, None], axis=0)
        return lax.dynamic_update_slice_in_dim(kept, stay, start, axis=0)

    return lax.fori_loop(0, blocks, block, place < n)[:n]


@lowers(torch.ops.lazytpu.nms.default, dynamic="iou_threshold")
def nms(out, dets, scores, iou_threshold):
    """Return the places of the boxes that stay, best first, filled up with the others; and how many stay."""
    if not scores.size:
        return jnp.zeros((0,), jnp.int64), jnp.int64(0)
    _, order = sorted_pair(scores, 0, descending=True)
    kept = _kept(dets[order], jnp.asarray(iou_threshold, jnp.float64))
    _, behind = sorted_pair(~kept, 0)
    return order[behind], jnp.sum(kept, dtype=jnp.int64)
