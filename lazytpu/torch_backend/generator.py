"""``torch.Generator(device="tpu")``: its numbers come from torch's generator of the CPU, which seeds the device's ops.

Torch makes generators in C++ and lets no Python backend make one.  So ``torch.Generator`` becomes a class that makes
torch's own for every other device, and for this one a CPU generator that says it is the device's.
"""

from __future__ import annotations

from typing import Any

import torch

from lazytpu.config import config

_Generator = torch._C.Generator


class _AnyGenerator(type(_Generator)):  # type: ignore[misc]
    """Takes torch's own generators for instances too: libraries ask ``isinstance(x, torch.Generator)``."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _Generator)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _Generator)


class Generator(_Generator, metaclass=_AnyGenerator):
    """Torch's class of generators, which knows the lazy device."""

    _where: torch.device

    def __new__(cls, device: torch.device | str | int = "cpu") -> Any:
        where = torch.device(device)
        if where.type != config.device_name:
            return _Generator(where)
        made = super().__new__(cls, "cpu")  # type: ignore[call-arg]
        made._where = torch.device(where.type, where.index or 0)
        return made

    def __init__(self, device: torch.device | str | int = "cpu") -> None:
        pass

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The device."""
        return self._where

    def clone_state(self) -> Generator:
        """Return a generator of the same state."""
        made = Generator(self._where)
        made.set_state(self.get_state())
        return made

    def __reduce__(self) -> Any:
        return _restored, (self._where, self.get_state())


def _restored(device: torch.device, state: torch.Tensor) -> Generator:
    made = Generator(device)
    made.set_state(state)
    return made


def register() -> None:
    """Make ``torch.Generator`` know the device."""
    Generator.__module__, Generator.__qualname__ = "torch", "Generator"
    setattr(torch, "Generator", Generator)  # noqa: B010  for mypy it is a class of torch's
