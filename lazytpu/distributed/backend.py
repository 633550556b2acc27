"""Make torch know the backend ``lazytpu``, the one of the device."""

from __future__ import annotations

import atexit
import functools
import importlib
import os
from collections.abc import Callable

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from lazytpu.config import config
from lazytpu.dispatch import exchange, own_device
from lazytpu.distributed import attention, counted, ddp, dtensor, fsdp, sync_batch_norm
from lazytpu.distributed.process_group import LazyProcessGroup
from lazytpu.ir.op_schema import Arg
from lazytpu.runtime import together, world

NAME = "lazytpu"


def register(name: str = NAME) -> None:
    """Register the backend: ``init_process_group("lazytpu")``, or with no backend at all."""
    if dist.is_available() and name.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(name, _made, extended_api=True, devices=[config.device_name])
        if name == NAME:
            counted.register(LazyProcessGroup)
            ddp.register()
            fsdp.register()
            dtensor.register()
            attention.register()
            sync_batch_norm.register()
            world.when_connected(own_device.register)
            _keep_attempts_apart()
            _settle_before_host_collectives()


_COLLECTIVES = """
    allgather allgather_coalesced allreduce allreduce_coalesced alltoall alltoall_base barrier broadcast gather
    recv recv_anysource reduce reduce_scatter scatter send _allgather_base _reduce_scatter_base
    all_gather_single all_to_all_single reduce_scatter_single
""".split()


def _settle_before(call: Callable[..., Arg]) -> Callable[..., Arg]:
    @functools.wraps(call)
    def settled(*args: Arg, **kwargs: Arg) -> Arg:
        exchange.settle()
        return call(*args, **kwargs)

    return settled


def _settle_before_host_collectives() -> None:
    """Have groups of other backends start what is recorded before their collectives, as `LazyProcessGroup` does."""
    for name in _COLLECTIVES:
        if name in vars(dist.ProcessGroup):
            setattr(dist.ProcessGroup, name, _settle_before(vars(dist.ProcessGroup)[name]))


def _keep_attempts_apart() -> None:
    """Have ``init_process_group`` look for no process of an attempt before this one.

    What torchrun starts again has the store of the first attempt, with the addresses that Gloo had then.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    module: Arg = importlib.import_module("torch.distributed.rendezvous")
    create = module._create_c10d_store
    if attempt != "0":
        module._create_c10d_store = lambda *args, **kwargs: PrefixStore(f"attempt-{attempt}", create(*args, **kwargs))


def _settle_at_exit() -> None:
    if not together.has_failed():
        exchange.settle()


def _made(options: Arg, _: object = None) -> LazyProcessGroup:
    ranks = list(options.global_ranks_in_group)
    if not ranks:
        world.connect(options.store, options.group_rank, options.group_size)
        atexit.register(_settle_at_exit)
    size = dist.get_world_size() if ranks else options.group_size
    return LazyProcessGroup(options.store, ranks, options.group_rank, options.group_size, size, options.timeout)
