"""The least time that a step can take: what it computes, moves to and from memory and between chips, at full speed.

    compute  sum over products of FLOPs x passes / peak FLOP/s, where a product of float32 takes 1, 3 or 6 passes of
             bfloat16 (``default``, ``high``, ``highest``)
    memory   bytes / bandwidth of the memory
    links    sum over collectives of f V (n - 1) / n / (links x bandwidth of a link), for V bytes over n devices, with
             f = 1 for all-gather and reduce-scatter, 2 for all-reduce, 1/4 for all-to-all; V / bandwidth of a link for
             a collective-permute

The last are those of rings in both directions (J. Austin et al., How to Scale Your Model, part 3,
https://jax-ml.github.io/scaling-book/sharding), here with the factor (n - 1) / n that they leave out for large n.  XLA
can overlap all three, so a step takes no less than the largest of them; where nothing overlaps, their sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lazytpu.debug.chips import Chip
from lazytpu.debug.collectives import Collective
from lazytpu.debug.hlo_costs import Product

PASSES = {"default": 1, "high": 3, "highest": 6}
_SENT = {"all-gather": 1.0, "reduce-scatter": 1.0, "all-reduce": 2.0, "all-to-all": 0.25, "ragged-all-to-all": 0.25}


@dataclass(frozen=True, slots=True)
class Roofline:
    """Seconds that each part of a step takes at full speed."""

    compute_s: float
    memory_s: float
    links_s: float

    @property
    def least_s(self) -> float:
        """Seconds where all three go on at the same time."""
        return max(self.compute_s, self.memory_s, self.links_s)

    @property
    def apart_s(self) -> float:
        """Seconds where one waits for the other."""
        return self.compute_s + self.memory_s + self.links_s

    @property
    def bound(self) -> str:
        """What takes longest: ``compute``, ``memory`` or ``links``."""
        return max(("compute", "memory", "links"), key=lambda name: float(getattr(self, f"{name}_s")))


def roofline(
    products: Iterable[Product],
    memory_bytes: float,
    collectives: Iterable[Collective],
    chip: Chip,
    links: Mapping[str, int],
) -> Roofline:
    """Return the least time of a step on one chip.

    Args:
        products: what it computes.
        memory_bytes: what it reads from and writes to memory.
        collectives: what it sends.
        chip: the figures.
        links: for each axis of the mesh, how many links of a chip its rings can use (`links_of`).
    """
    compute_s = sum(compute_seconds(p, chip) for p in products)
    links_s = sum(link_seconds(c, chip, links) for c in collectives)
    return Roofline(compute_s, memory_bytes / chip.hbm_bandwidth, links_s)


def compute_seconds(product: Product, chip: Chip) -> float:
    """Return the seconds of all runs of a product."""
    if product.dtype in ("s8", "u8", "s4", "u4"):
        return product.flops * product.runs / chip.int8_ops
    passes = PASSES.get(product.precision, 1) if product.dtype in ("f32", "f64", "c64") else 1
    return product.flops * product.runs * passes / chip.flops


def link_seconds(one: Collective, chip: Chip, links: Mapping[str, int]) -> float:
    """Return the seconds of all runs of a collective."""
    if one.group < 2:
        return 0.0
    if one.kind.startswith("collective"):
        return one.total_bytes / chip.link_bandwidth
    count = max(1, sum(links.get(name, 1) for name in one.axis.split("+")))
    sent = _SENT[one.kind] * one.total_bytes * (one.group - 1) / one.group
    return sent / (count * chip.link_bandwidth)


def links_of(coordinates: Sequence[Sequence[int]], extents: Sequence[int], chip: Chip) -> int:
    """Return how many links of a chip the rings of a group can use.

    Two along each side of the grid in which its chips differ; one where that side is too short to be a ring.  Of chips
    behind a switch all; between hosts no more than the network cards of those on a host are worth together.

    Args:
        coordinates: of the chips of a group; of those behind a switch, the host is the first.
        extents: sizes of the whole grid.
    """
    if chip.switched:
        hosts = len({place[0] for place in coordinates})
        return chip.switched if hosts == 1 else min(chip.switched, chip.network * len(coordinates) // hosts)
    found = 0
    for side, extent in enumerate(extents):
        length = len({place[side] for place in coordinates})
        if length > 1:
            found += 2 if length == extent and extent % chip.wraps == 0 and extent > 2 else 1
    return found
