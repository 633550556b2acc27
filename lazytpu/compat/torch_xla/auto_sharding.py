"""``use_spmd(auto=True)``: how tensors lie that nobody has marked.

torch_xla has a pass of XLA find that out, which the XLA of jax does not have.  Here each tensor is split when it
comes from the host, by its sizes alone: along its largest dimension that divides.  XLA chooses for what is computed.
"""

from __future__ import annotations

import os

from lazytpu import spmd
from lazytpu.diagnosis.events import Compilation
from lazytpu.ir.sharding import Sharding, sharding
from lazytpu.observe import metrics
from lazytpu.observers import Observer, add
from lazytpu.tensors.layout import Layout


class _Counts(Observer):
    """Counts the graphs that are compiled while it is on."""

    def graph_compiled(self, compilation: Compilation) -> None:
        if is_on():
            metrics.count("auto_sharded")


add(_Counts())


def use() -> None:
    """Switch it on, by the variable of torch_xla."""
    os.environ["XLA_AUTO_SPMD"] = "1"


def is_on() -> bool:
    """Return whether it is on."""
    return os.environ.get("XLA_AUTO_SPMD") == "1"


def setting() -> str:
    """Return the mesh that it is set to, as ``XLA_AUTO_SPMD_MESH`` has it, all devices by default; empty while off."""
    return os.environ.get("XLA_AUTO_SPMD_MESH", "-1") if is_on() else ""


def choice(layout: Layout) -> Sharding | None:
    """Return how a tensor from the host is to lie: along each axis of the mesh, the longest first, its dimension whose
    parts are largest; None where nothing divides, or it is off.

    Raises:
        ValueError: ``XLA_AUTO_SPMD_MESH`` is not the shape of a mesh of all devices.
    """
    if not is_on():
        return None
    mesh = spmd.Mesh([int(n) for n in setting().split(",")])
    parts, split = list(layout.size), list[tuple[str, ...]]([()] * len(layout.size))
    for axis, n in sorted(mesh.axes.items(), key=lambda item: -item[1]):
        fits = [d for d, size in enumerate(parts) if size and size % n == 0]
        if fits:
            d = max(fits, key=parts.__getitem__)
            parts[d], split[d] = parts[d] // n, (*split[d], axis)
    return sharding(mesh, split, layout.size) if any(split) else None
