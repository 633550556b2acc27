"""Make torch know the backend ``lazytpu``, the one of the device."""

from __future__ import annotations

import torch.distributed as dist

from lazytpu.config import config
from lazytpu.distributed import ddp, fsdp
from lazytpu.distributed.process_group import LazyProcessGroup
from lazytpu.ir.op_schema import Arg
from lazytpu.runtime import world

NAME = "lazytpu"


def register(name: str = NAME) -> None:
    """Register the backend: ``init_process_group("lazytpu")``, or with no backend at all."""
    if dist.is_available() and name.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(name, _made, extended_api=True, devices=[config.device_name])
        if name == NAME:
            ddp.register()
            fsdp.register()


def _made(options: Arg, _: object = None) -> LazyProcessGroup:
    ranks = list(options.global_ranks_in_group)
    if not ranks:
        world.connect(options.store, options.group_rank, options.group_size)
    size = dist.get_world_size() if ranks else options.group_size
    return LazyProcessGroup(options.store, ranks, options.group_rank, options.group_size, size, options.timeout)


__all__ = ["NAME", "register"]
