"""``nn.DataParallel`` on one device, which scripts for CUDA wrap their model in whatever there is.

Torch splits batches and copies models in C++ that it builds for CUDA alone, and that needs a GPU; over one device these
functions move a tensor and leave it whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from lazytpu.config import config
from lazytpu.torch_backend import torch_module


def _own(devices: Sequence[int]) -> torch.device:
    """Return the one device.

    Raises:
        RuntimeError: there are several.
    """
    if len(devices) != 1:
        raise RuntimeError(
            f"nn.DataParallel over {len(devices)} devices: use lazytpu.spmd.data_parallel, or a process for each with "
            "DistributedDataParallel"
        )
    return torch.device(config.device_name, torch_module.check_index(devices[0]))


def _scatter(
    tensor: torch.Tensor, devices: Sequence[int], sizes: Sequence[int] | None, dim: int, streams: object
) -> list[torch.Tensor]:
    return [tensor.to(_own(devices))]


def _gather(tensors: Sequence[torch.Tensor], dim: int, destination: int | None) -> torch.Tensor:
    whole = tensors[0] if len(tensors) == 1 else torch.cat([*tensors], dim)
    return whole.to("cpu" if destination == -1 else _own([destination or 0]))


def _broadcast(tensor: torch.Tensor, devices: Sequence[int]) -> list[torch.Tensor]:
    return [tensor.to(_own(devices))]


def _broadcast_coalesced(
    tensors: Sequence[torch.Tensor], devices: Sequence[int], buffer_size: int
) -> list[list[torch.Tensor]]:
    return [[tensor.to(_own(devices)) for tensor in tensors]]


def _unless_cuda(ours: Callable[..., object], theirs: Callable[..., object] | None) -> Callable[..., object]:
    """Return what takes torch's own function where it was built for CUDA and finds a GPU, and ours otherwise."""
    if theirs is None:
        return ours
    return lambda *args: (theirs if torch.cuda.is_available() else ours)(*args)


def register() -> None:
    """Give torch the functions."""
    for function in (_scatter, _gather, _broadcast, _broadcast_coalesced):
        name = function.__name__
        setattr(torch._C, name, _unless_cuda(function, getattr(torch._C, name, None)))
