"""``torch_mlu.core.mlu_model``: the device and its settings."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TypeVar

import torch

import lazytpu
from lazytpu.compat import names

__getattr__ = names.missing_from(__name__)

T = TypeVar("T", torch.Tensor, torch.nn.Module, torch.optim.Optimizer)
_CORE_VERSIONS = ("MLU220", "MLU270", "MLU290", "MLU370")


def mlu_device(index: int = 0) -> torch.device:
    """Return the device."""
    return lazytpu.device(index)


def is_available() -> bool:
    """Return whether there is a device."""
    return lazytpu.is_available()


def device_count() -> int:
    """Return the number of devices."""
    return lazytpu.device_count()


def set_device(device: torch.device | str | int) -> None:
    """Make a device the current one; there is only one.

    Raises:
        ValueError: it is not device 0.
    """
    lazytpu.device(device if isinstance(device, int) else torch.device(device).index or 0)


def set_core_number(core_number: int) -> None:
    """Check the number of cores; XLA decides how many it uses.

    Raises:
        ValueError: it is not a positive number.
    """
    if core_number < 1:
        raise ValueError(f"core_number is at least 1, not {core_number}")


def set_core_version(core_version: str) -> None:
    """Check the name of a chip; XLA compiles for the device that is present.

    Raises:
        ValueError: there is no such chip.
    """
    if core_version not in _CORE_VERSIONS:
        raise ValueError(f"core_version is one of {', '.join(_CORE_VERSIONS)}, not {core_version!r}")


def set_input_format(input_format: int) -> None:
    """Check the order of an image's channels, 0 for RGBA to 3 for ABGR; tensors are used as they are.

    Raises:
        ValueError: it is not 0, 1, 2 or 3.
    """
    if input_format not in range(4):
        raise ValueError(f"input_format is 0 (RGBA), 1 (ARGB), 2 (BGRA) or 3 (ABGR), not {input_format}")


def set_cnml_enabled(enabled: bool) -> None:
    """Do nothing: XLA does inference and training."""


def to(optimizer: T, device: torch.device | str) -> T:
    """Move an optimizer's state (or a module, or a tensor) to the device and return it."""
    target = lazytpu.device() if torch.device(device).type not in ("cpu", "meta") else torch.device(device)
    if not isinstance(optimizer, torch.optim.Optimizer):
        return optimizer.to(target)
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                state[name] = value.to(target)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.device.type != target.type:
                parameter.data = parameter.data.to(target)
    return optimizer


def save(data: object, path: str | os.PathLike[str]) -> None:
    """Write a file with ``torch.save``; mapped to the CPU, it loads on a machine without the device."""
    torch.save(data, path)


def load(path: str | os.PathLike[str], map_location: torch.device | str | None = None) -> Mapping[str, object]:
    """Read a file with ``torch.load``."""
    found: Mapping[str, object] = torch.load(path, map_location=map_location)
    return found
