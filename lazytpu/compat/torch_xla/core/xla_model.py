"""``torch_xla.core.xla_model`` for one device: devices, steps, transfers, random numbers."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO, Protocol, TextIO, TypedDict, cast

import torch
from torch.types import Device

import lazytpu
from lazytpu import random
from lazytpu.compat import names
from lazytpu.compat.torch_xla import environment
from lazytpu.compat.torch_xla.core import world
from lazytpu.compat.torch_xla.core.collectives import *  # noqa: F403
from lazytpu.compat.torch_xla.core.collectives import Groups, reduce_gradients
from lazytpu.compat.torch_xla.core.rate import RateTracker as RateTracker
from lazytpu.export.portable import bytecode_of
from lazytpu.runtime import client
from lazytpu.tracing.record import is_device_tensor

__getattr__ = names.missing_from(__name__)

XLA_LIB = None
_closures: list[Callable[[], object]] = []


# --- devices ------------------------------------------------------------------------------------------------------


def xla_device(n: int | None = None, devkind: str | None = None) -> torch.device:
    """Return the device, ``xla:0`` under the runner.

    Raises:
        ValueError: ``n`` is not 0.
    """
    return lazytpu.device(n or 0)


def xla_real_devices(devices: Sequence[torch.device] | None = None) -> list[str]:
    """Return XLA's names of devices, such as ``CPU:0``."""
    return [f"{device_type()}:{torch.device(d).index or 0}" for d in devices or [xla_device()]]


xla_replication_devices = xla_real_devices  # each process replicates on its own


def xla_device_hw(device: str | torch.device) -> str:
    """Return ``CPU``, ``CUDA`` or ``TPU``."""
    return device_type()


def xla_device_kind(device: str | torch.device | None = None) -> str:
    """Return the manufacturer's name of the device."""
    return str(client.device().device_kind)


def device_type() -> str:
    """Return the platform by its name in ``PJRT_DEVICE``."""
    return {"cpu": "CPU", "gpu": "CUDA", "cuda": "CUDA", "tpu": "TPU"}.get(lazytpu.platform(), lazytpu.platform())


def get_xla_supported_devices(devkind: str | None = None, max_devices: int | None = None) -> list[str]:
    """Return the names of the devices: one."""
    wanted = {devkind} if isinstance(devkind, str) else set(devkind or ())
    if wanted and device_type() not in {w.upper() for w in wanted}:
        return []
    return [str(lazytpu.device(i)) for i in range(lazytpu.device_count())][:max_devices]


def is_xla_tensor(tensor: object) -> bool:
    """Return whether a tensor is on the device."""
    return is_device_tensor(tensor)


def get_ordinal(defval: int = 0) -> int:
    """Return the number of this process; 0 in SPMD."""
    return world.rank()


get_local_ordinal = get_ordinal


def xrt_world_size(defval: int = 1) -> int:
    """Return the number of processes; 1 in SPMD."""
    return world.size()


def is_master_ordinal(local: bool = True) -> bool:
    """Return whether this is the first process."""
    return world.rank() == 0


def master_print(*args: object, fd: TextIO | None = None, local: bool = False, flush: bool = False) -> None:
    """Print, in the first process only."""
    if not is_master_ordinal(local):
        return
    print(*args, file=fd or sys.stdout, flush=flush)


def get_memory_info(device: Device = None) -> MemoryInfo:
    """Return the bytes in use and the capacity of the device."""
    return {
        "bytes_used": client.memory_allocated(),
        "bytes_limit": client.memory_limit(),
        "peak_bytes_used": client.memory_peak(),
    }


class MemoryInfo(TypedDict):
    """The result of `get_memory_info`, in bytes."""

    bytes_used: int
    bytes_limit: int
    peak_bytes_used: int


# --- steps --------------------------------------------------------------------------------------------------------


def mark_step(wait: bool = False, reset_scope: bool = True) -> None:
    """End a step (`lazytpu.mark_step`), then run the step closures."""
    lazytpu.mark_step(wait=wait or environment.is_on("XLA_SYNC_WAIT"))
    _run_step_closures()


def _run_step_closures() -> None:
    """Write the metrics and run the step closures, as torch_xla does at the end of a step."""
    environment.save_metrics()
    waiting, _closures[:] = list(_closures), []  # those that a closure adds are for the next step
    for closure in waiting:
        closure()


def unlazy(tensors: Sequence[torch.Tensor]) -> None:
    """Run what is pending and wait for it."""
    lazytpu.mark_step(wait=True)


def wait_device_ops(devices: Sequence[str] = ()) -> None:
    """Wait until the device is idle."""
    lazytpu.wait()


def add_step_closure(closure: Callable[..., object], args: tuple[object, ...] = (), run_async: bool = False) -> None:
    """Call ``closure(*args)`` after the next `mark_step`, in order; tensors among ``args`` are computed by then."""
    kept = tuple(
        a.detach().clone() if isinstance(a, torch.Tensor) and is_device_tensor(a) else a for a in args
    )  # as they are now
    _closures.append(lambda: closure(*kept))


def optimizer_step(
    optimizer: torch.optim.Optimizer,
    barrier: bool = False,
    optimizer_args: dict[str, Callable[[], float]] | None = None,
    groups: Groups = None,
    pin_layout: bool = True,
) -> float | None:
    """Reduce the gradients over the processes and step.

    Args:
        optimizer: what steps.
        barrier: end the step too.
        optimizer_args: keyword arguments of ``optimizer.step``.
    """
    reduce_gradients(optimizer, groups=groups, pin_layout=pin_layout)
    loss = optimizer.step(**(optimizer_args or {}))
    if barrier:
        mark_step()
    return loss


def _fetch_gradients(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the gradients, which scripts with a GradScaler reduce by themselves."""
    return [p.grad.data for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def optimization_barrier_(tensors: Sequence[torch.Tensor]) -> None:
    """Keep XLA from fusing across this point: the step is cut here."""
    lazytpu.mark_step()


def get_stablehlo(tensors: Sequence[torch.Tensor] | None = None) -> str:
    """Return the StableHLO of the pending graph of some tensors, or of all."""
    return lazytpu.stablehlo_text(*(tensors or ()))


def get_stablehlo_bytecode(tensors: Sequence[torch.Tensor] | None = None) -> bytes:
    """Return the same as portable bytecode, which later versions of XLA read."""
    return bytecode_of(get_stablehlo(tensors))


# --- transfers and files --------------------------------------------------------------------------------------------


class _Spec(Protocol):
    """What a ``ShardingSpec`` of ``torch_xla.distributed.spmd`` can do."""

    def can_apply(self, t: torch.Tensor) -> bool: ...
    def apply(self, t: torch.Tensor) -> None: ...


def _apply_sharding(batch: object, sharding: object) -> None:
    """Split the tensors of a pytree that have as many dimensions as a sharding says, or none."""
    if sharding is not None:
        for t in torch.utils._pytree.tree_leaves(batch):
            if isinstance(t, torch.Tensor) and cast(_Spec, sharding).can_apply(t):
                cast(_Spec, sharding).apply(t)


def send_cpu_data_to_device(datas: object, device: Device, input_sharding: _Spec | None = None) -> list[object]:
    """Move the tensors of a pytree, and split them; return a list of the elements of ``datas``."""
    moved = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), datas)
    _apply_sharding(moved, input_sharding)
    return list(moved) if isinstance(moved, (list, tuple)) else [moved]


def save(
    data: object,
    file_or_path: str | os.PathLike[str] | BinaryIO,
    master_only: bool = True,
    global_master: bool = False,
) -> None:
    """Write the data with ``torch.save``, moved to the CPU first."""
    torch.save(_maybe_convert_to_cpu(data), file_or_path)


def _maybe_convert_to_cpu(data: object, convert: bool = True) -> object:
    """Return the data with its device tensors on the CPU; parameters stay parameters."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        moved = tensor.detach().cpu()
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(moved, tensor.requires_grad)
        return moved.requires_grad_(tensor.requires_grad)

    return torch.utils._pytree.tree_map_only(torch.Tensor, move, data) if convert else data


# --- random numbers -------------------------------------------------------------------------------------------------


def set_rng_state(seed: int, device: Device = None) -> None:
    """Seed the device, or continue from where `get_rng_state` was called."""
    random.manual_seed(seed & ((1 << 64) - 1))
    random.default_generator.counter = seed >> 64


def get_rng_state(device: Device = None) -> int:
    """Return the seed, and above its 64 bits the number of random ops so far."""
    return random.default_generator.seed | random.default_generator.counter << 64


@contextlib.contextmanager
def fork_rng(device: Device = None, enabled: bool = True) -> Iterator[None]:
    """Restore the random state afterwards, as if no random number had been used inside."""
    state, cpu = get_rng_state(), torch.get_rng_state()
    try:
        yield
    finally:
        if enabled:
            set_rng_state(state)
            torch.set_rng_state(cpu)
