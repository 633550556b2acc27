"""The device as users name it."""

from __future__ import annotations

import torch

from lazytpu.config import config
from lazytpu.torch_backend import rank_device


def device(index: int = 0) -> torch.device:
    """Return the lazy device.

    Args:
        index: 0, or the local rank of this process among several: there is one device in a process.

    Raises:
        ValueError: there is no such device, or it is another process's.
    """
    if not rank_device.is_own(index):
        raise ValueError(rank_device.refused(index))
    return torch.device(config.device_name, 0)


def device_count() -> int:
    """Return how many devices there are: one, or as many as processes on this host."""
    return rank_device.count()


def is_available() -> bool:
    """Return whether the device can be used."""
    return True
