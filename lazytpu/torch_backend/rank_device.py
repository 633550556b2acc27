"""The number of this process's device among those of its host: that of its local rank.

A process has one device.  Torch numbers it 0 in each, so tensors say ``tpu:0``; scripts for several GPUs call it by the
local rank, which is another name for it.
"""

from __future__ import annotations

from lazytpu.config import config
from lazytpu.runtime import world


def is_own(index: int | None) -> bool:
    """Return whether a number is one of this process's device."""
    return index in (None, -1, 0) or index == world.local_rank()


def count() -> int:
    """Return how many devices the processes of this host have."""
    return max(world.local_size(), world.local_rank() + 1)


def refused(index: int | None) -> str:
    """Return what to say where somebody asks for a device that is not this process's."""
    name, own, among = config.device_name, world.local_rank(), count()
    if among == 1:
        return f"there is one device, {name}:0, not number {index}"
    whose = f"local rank {index} has {name}:{index}" if index in range(among) else f"there are {among} devices"
    return f"this process is local rank {own} and has {name}:{own}; {whose}"
