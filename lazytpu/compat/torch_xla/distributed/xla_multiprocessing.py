"""``torch_xla.distributed.xla_multiprocessing``: one process, in which the function runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch.types import Device

from lazytpu.compat import names

__getattr__ = names.missing_from(__name__)


T = TypeVar("T")


def spawn(
    fn: Callable[..., object],
    args: tuple[object, ...] = (),
    nprocs: int | None = None,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> None:
    """Run ``fn(0, *args)`` in this process, which has the only device.

    Raises:
        ValueError: ``nprocs`` is neither None nor 1.
    """
    if nprocs not in (None, 1):
        raise ValueError(f"nprocs={nprocs}: there is one device; use None or 1")
    fn(0, *args)


class MpModelWrapper:
    """Holds a model that processes share, of which there is one."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def to(self, device: Device) -> torch.nn.Module:
        """Return the model, moved."""
        return self._model.to(device)


class MpSerialExecutor:
    """Runs a function in one process after the other."""

    def run(self, fn: Callable[[], T]) -> T:
        """Return the result of ``fn``."""
        return fn()
