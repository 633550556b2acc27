"""The processes of a script of torch_xla, and what they exchange: ``torch.distributed``, under torch_xla's names.

Each has one device.  A script of SPMD is one program over all devices, and sees a world of one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map

from lazytpu import spmd
from lazytpu.compat.torch_xla import auto_sharding
from lazytpu.runtime import meshes
from lazytpu.tensors import unsent

T = TypeVar("T")
Groups = Sequence[Sequence[int]] | None
_asked: list[bool] = []  # not empty once `use_spmd` was called

_REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "mul": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "and": dist.ReduceOp.BAND,
    "or": dist.ReduceOp.BOR,
}


def use_spmd() -> None:
    """Choose the global view; from now on XLA_USE_SPMD says whether it is chosen still, as in torch_xla.

    Tensors that are moved to the device wait on the host until they are marked or used.
    """
    spmd.use()
    unsent.choices[:] = [auto_sharding.choice]
    _asked[:] = [True]
    os.environ["XLA_USE_SPMD"] = "1"


def is_spmd() -> bool:
    """Return whether the script has asked for SPMD, or a tensor has a sharding."""
    return os.environ.get("XLA_USE_SPMD") == "1" or bool(meshes.used and not _asked)


def size() -> int:
    """Return the number of processes: those that torchrun, or `spawn`, has started."""
    if is_spmd():
        return 1
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", 1)) if "RANK" in os.environ else 1


def rank() -> int:
    """Return the number of this process."""
    if size() == 1:
        return 0
    return dist.get_rank() if dist.is_initialized() else int(os.environ["RANK"])


def reduced(x: torch.Tensor, reduction: str, groups: Groups) -> torch.Tensor:
    """Return the sum, or another reduction, of what the processes of a group have."""
    found = x.detach().clone()
    dist.all_reduce(found, _REDUCTIONS[reduction], _group(groups))
    return found


def gathered(x: torch.Tensor, dim: int, groups: Groups) -> torch.Tensor:
    """Return what the processes of a group have, side by side."""
    group = _group(groups)
    own = (x.unsqueeze(0) if x.dim() == 0 else x).detach().movedim(dim, 0).contiguous()
    found = own.new_empty((own.shape[0] * dist.get_world_size(group), *own.shape[1:]))
    dist.all_gather_into_tensor(found, own, group)
    return found.movedim(0, dim)


def scattered(x: torch.Tensor, reduction: str, dim: int, groups: Groups) -> torch.Tensor:
    """Return a share of the sum of what the processes of a group have."""
    group = _group(groups)
    own = x.detach().movedim(dim, 0).contiguous()
    _check_divides(own, dist.get_world_size(group))
    found = own.new_empty((own.shape[0] // dist.get_world_size(group), *own.shape[1:]))
    dist.reduce_scatter_tensor(found, own, _REDUCTIONS[reduction], group)
    return found.movedim(0, dim)


def exchanged(x: torch.Tensor, split: int, concat: int, groups: Groups) -> torch.Tensor:
    """Return this process's share of what each of a group has, side by side."""
    group = _group(groups)
    own = x.detach().movedim(split, 0).contiguous()
    _check_divides(own, dist.get_world_size(group))
    found = torch.empty_like(own)
    dist.all_to_all_single(found, own, group=group)
    parts = found.chunk(dist.get_world_size(group), 0)
    return torch.cat([part.movedim(0, split) for part in parts], concat)


def permuted(x: torch.Tensor, pairs: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return what another process has, zeros where none sends to this one."""
    every = gathered(x.unsqueeze(0), 0, None)
    source = next((a for a, b in pairs if b == rank()), None)
    return torch.zeros_like(x) if source is None else every[source]


def spread(tensors: Sequence[torch.Tensor], root: int, groups: Groups) -> None:
    """Overwrite tensors with those of a process."""
    for x in tensors:
        dist.broadcast(x.detach(), root, _group(groups))


def of_all(data: T) -> list[T]:
    """Return what each process has, tensors of it on the CPU."""
    _connect()
    found = [data] * size()
    dist.all_gather_object(found, tree_map(lambda x: x.cpu() if isinstance(x, torch.Tensor) else x, data))
    return found


def meet() -> None:
    """Wait for all processes."""
    _connect()
    dist.barrier()


def run(function: Callable[..., object], arguments: tuple[object, ...]) -> None:
    """Call a function with the number of this process, which `lazytpu.launch` has started."""
    function(rank(), *arguments)


def _connect() -> None:
    if not dist.is_initialized():
        dist.init_process_group(init_method="env://")


def _group(groups: Groups) -> dist.ProcessGroup | None:
    _connect()
    if not groups:
        return None
    found = tuple([tuple(group) for group in groups])
    if sorted(i for group in found for i in group) != list(range(size())):
        raise ValueError(f"groups={groups}: each of {size()} processes is in one group")
    return _groups(found, id(dist.group.WORLD))


@cache
def _groups(groups: tuple[tuple[int, ...], ...], world: int) -> dist.ProcessGroup | None:
    made = [dist.new_group(list(group)) for group in groups]
    own: dist.ProcessGroup = next(one for one, group in zip(made, groups, strict=True) if rank() in group)
    return own


def _check_divides(x: torch.Tensor, count: int) -> None:
    if x.shape[0] % count:
        raise ValueError(f"a dimension of {x.shape[0]} does not divide among {count} processes")
