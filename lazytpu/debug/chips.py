"""Figures of chips as their makers publish them: what a chip computes, holds and moves at most."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chip:
    """A kind of chip.  Speeds are a second, and the highest that are published.

    Attributes:
        name: as topologies name it.
        flops: of bfloat16, a multiplication and an addition as two.
        int8_ops: of int8.
        hbm_bytes: memory.
        hbm_bandwidth: bytes to and from memory together.
        link_bandwidth: bytes over one link to a neighbour, in one direction.
        wraps: a side of the grid is a ring where its length is a multiple of this.
        switched: links to a switch that joins the chips of a host, of those that are in no grid; else 0.
        network: as many links as such a chip's part of the network between hosts is worth.
    """

    name: str
    flops: float
    int8_ops: float
    hbm_bytes: float
    hbm_bandwidth: float
    link_bandwidth: float
    wraps: int
    switched: int = 0
    network: int = 0


# https://cloud.google.com/tpu/docs/v5e, v5p and v6e, tables of key specifications; the bandwidth of a link is that of
# all of a chip in both directions (400, 1200 and 800 GB/s) over twice its ports (4, 6 and 4).
_CHIPS = {
    "TPU v5 lite": Chip("v5e", 197e12, 393e12, 16e9, 819e9, 50e9, 16),
    "TPU v5": Chip("v5p", 459e12, 918e12, 95 * 2**30, 2765e9, 100e9, 4),
    "TPU v6 lite": Chip("v6e", 918e12, 1836e12, 32e9, 1638e9, 100e9, 16),
}
_CHIPS["TPU v5p"] = _CHIPS["TPU v5"]

# https://resources.nvidia.com/en-us-tensor-core (H100 SXM, dense): 989 TFLOP/s, 80 GB, 3.35 TB/s, NVLink 900 GB/s in
# both directions over 18 links; a DGX H100 has a network card of 400 Gb/s for each GPU.
_CHIPS["NVIDIA H100 80GB HBM3"] = Chip("H100", 989e12, 1979e12, 80e9, 3350e9, 25e9, 1, switched=18, network=2)


def chip_of(kind: str) -> Chip | None:
    """Return the figures of a ``device_kind`` of jax's; None where there are none."""
    return _CHIPS.get(kind)
