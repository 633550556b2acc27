"""``torch_xla.distributed.xla_multiprocessing``: one process, in which the function runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lazytpu.compat import lacking

__getattr__ = lacking.names_of(__name__)


def spawn(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    nprocs: int | None = None,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> None:
    """Runs ``fn(0, *args)`` in this process, which has the only device.

    Raises:
        ValueError: ``nprocs`` is neither None nor 1.
    """
    if nprocs not in (None, 1):
        raise ValueError(f"nprocs={nprocs}: there is one device; leave it out, or give 1")
    fn(0, *args)


class MpModelWrapper:
    """Holds a model that processes share, of which there is one."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def to(self, device: Any) -> torch.nn.Module:
        """The model, moved."""
        return self._model.to(device)


class MpSerialExecutor:
    """Runs something in one process after the other."""

    def run(self, fn: Callable[[], Any]) -> Any:
        """What ``fn`` returns."""
        return fn()
