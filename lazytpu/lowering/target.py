"""What programs are for: the devices of this machine, or those of a topology that is only described."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import jax


@dataclass(frozen=True, eq=False)
class Topology:
    """Devices that XLA can compile for and that need not be there.

    Attributes:
        name: as jax takes it, ``v5e:2x4``.
        platform: ``tpu``, ``gpu`` or ``cpu``.
        devices: jax's descriptions of them; on these nothing can run.
    """

    name: str
    platform: str
    devices: tuple[jax.Device, ...]


_described: list[Topology] = []


def described() -> Topology | None:
    """Return the topology that programs are for; None where they are for the devices of this machine."""
    return _described[-1] if _described else None


def devices() -> Sequence[jax.Device]:
    """Return all devices of all processes that programs are for."""
    return _described[-1].devices if _described else jax.devices()


@contextmanager
def compiling_for(topology: Topology) -> Iterator[None]:
    """Let what is compiled inside be for the devices of a topology; nothing can run."""
    _described.append(topology)
    try:
        yield
    finally:
        _described.remove(topology)
