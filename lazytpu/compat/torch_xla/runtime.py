"""``torch_xla.runtime``: processes with one device each, or one program over all devices."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypedDict

import lazytpu
from lazytpu.compat import names
from lazytpu.compat.torch_xla import auto_sharding
from lazytpu.compat.torch_xla.core import world, xla_model
from lazytpu.lowering import target
from lazytpu.runtime import client, meshes, processes

__getattr__ = names.missing_from(__name__)

device_type = xla_model.device_type


def set_device_type(pjrt_device: str) -> None:
    """Choose the platform.

    Raises:
        RuntimeError: jax already runs on another one.
    """
    if pjrt_device.upper().replace("GPU", "CUDA") != device_type():
        raise RuntimeError(
            f"jax already runs on {device_type()}; set JAX_PLATFORMS for {pjrt_device} before importing jax"
        )


def using_pjrt() -> bool:
    """Return whether the runtime is PJRT: it is, jax's."""
    return True


def is_bf16_supported() -> bool:
    """Return whether the device computes in bfloat16."""
    return True


def world_size() -> int:
    """Return the number of processes that compute apart; 1 in SPMD."""
    return world.size()


def process_count() -> int:
    """Return the number of processes."""
    return max(len(meshes.devices_by_process()), world.size())


def local_process_count() -> int:
    """Return the number of processes on this machine, as torchrun says; else all."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", process_count()))


def global_device_count() -> int:
    """Return the number of devices that a script sees, over which shardings spread its tensors."""
    return lazytpu.device_count()


local_device_count = addressable_device_count = global_device_count


def global_runtime_device_count() -> int:
    """Return the number of devices of all processes."""
    return len(meshes.devices())


def addressable_runtime_device_count() -> int:
    """Return the number of devices of this process."""
    return len(meshes.devices_by_process()[processes.rank()])


def global_ordinal() -> int:
    """Return the number of this process among those that compute apart; 0 in SPMD."""
    return world.rank()


def local_ordinal() -> int:
    """Return the number of this process on this machine; 0 in SPMD."""
    return int(os.environ.get("LOCAL_RANK", 0)) if world.size() > 1 else 0


def process_index() -> int:
    """Return the number of this process, in SPMD too."""
    if world.size() > 1:
        return world.rank()
    client.platform()  # connects the processes
    return processes.rank()


def host_index() -> int:
    """Return the number of this machine."""
    return process_index() // local_process_count()


class Attributes(TypedDict, total=False):
    """What is known of a device; the last three of TPUs only."""

    name: str
    kind: str
    coords: Sequence[int]
    core_on_chip: int
    slice_index: int


def runtime_device_attributes(device: str) -> Attributes:
    """Return the name and the kind of a device, and where a TPU is: coordinates, core of the chip, slice."""
    found: Attributes = {"name": str(device), "kind": xla_model.xla_device_kind()}
    known = {f"{xla_model.device_type()}:{d.id}": d for d in target.devices()}.get(str(device))
    if known is not None and hasattr(known, "slice_index"):
        found |= {"coords": known.coords, "core_on_chip": known.core_on_chip, "slice_index": known.slice_index}
    return found


def global_runtime_device_attributes() -> list[Attributes]:
    """Return the attributes of each device of all processes."""
    return [runtime_device_attributes(f"{device_type()}:{number}") for number in meshes.devices()]


def is_spmd() -> bool:
    """Return whether `use_spmd` was called, or a tensor has a sharding."""
    return world.is_spmd()


def use_spmd(auto: bool | None = False) -> None:
    """Do as `lazytpu.spmd.use`; from then on a tensor that is moved waits on the host until it is marked or used.

    Args:
        auto: split what nobody has marked along its largest dimension, over a mesh of the shape that the variable
            ``XLA_AUTO_SPMD_MESH`` has, such as ``2,4``; by default one axis of all devices.
    """
    world.use_spmd()
    if auto:
        auto_sharding.use()


def get_master_ip() -> str:
    """Return the host of the first process."""
    return "localhost"


def initialize_cache(path: str, readonly: bool = False) -> None:
    """Keep compiled graphs in a folder, for the next process.

    Raises:
        ValueError: ``readonly`` is True.
    """
    if readonly:
        raise ValueError("readonly=True is not supported; set LAZYTPU_DISK_CACHE=0 to disable the disk cache")
    lazytpu.config.disk_cache_dir = path
    lazytpu.config.disk_cache = True


def get_num_cached_compilation_graph() -> int:
    """Return the number of graphs that were compiled or loaded."""
    return lazytpu.metrics.counter("compile") + lazytpu.metrics.counter("disk_hit")
