"""``torch_xla.distributed.xla_multiprocessing``: the function runs in this process, or in as many as are asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch.types import Device

from lazytpu.compat import names
from lazytpu.compat.torch_xla.core import world
from lazytpu.distributed.launching import launch

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
    """Run ``fn(index, *args)`` in this process, which is one of those of torchrun or the only one, or in new processes.

    Args:
        nprocs: how many new processes; None or 1 for this one.
        join, daemon, start_method: not looked at: the call waits for the processes, which are started anew.

    Raises:
        ValueError: ``join`` is False for new processes.
        WorldError: a process failed; has its traceback.
    """
    if nprocs in (None, 1):
        fn(world.rank(), *args)
    elif not join:
        raise ValueError("spawn(join=False): the call waits for its processes")
    else:
        launch(world.run, nprocs or 1, fn, args)


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
