"""The device as users name it."""

from __future__ import annotations

import torch

from lazytpu.config import config


def device(index: int = 0) -> torch.device:
    """The lazy device.

    Args:
        index: always 0: there is one device in a process.

    Raises:
        ValueError: there is no such device.
    """
    if index != 0:
        raise ValueError(f"there is one device, {config.device_name}:0, not {config.device_name}:{index}")
    return torch.device(config.device_name, 0)


def device_count() -> int:
    """How many devices there are: one."""
    return 1


def is_available() -> bool:
    """Whether the device can be used."""
    return True
