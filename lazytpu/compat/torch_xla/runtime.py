"""``torch_xla.runtime``: this process and its device among others, of which there are none."""

from __future__ import annotations

import lazytpu
from lazytpu.compat import lacking
from lazytpu.compat.torch_xla.core import xla_model

__getattr__ = lacking.names_of(__name__)

device_type = xla_model.device_type


def set_device_type(pjrt_device: str) -> None:
    """Says which device is wanted.

    Raises:
        RuntimeError: jax runs on another one, and cannot be moved any more.
    """
    if pjrt_device.upper().replace("GPU", "CUDA") != device_type():
        raise RuntimeError(f"jax runs on {device_type()}; set JAX_PLATFORMS before it is imported for {pjrt_device}")


def using_pjrt() -> bool:
    """Whether the runtime is PJRT: it is, jax's."""
    return True


def is_bf16_supported() -> bool:
    """Whether the device computes in bfloat16."""
    return True


def world_size() -> int:
    """How many processes take part."""
    return 1


local_process_count = process_count = world_size


def global_device_count() -> int:
    """How many devices there are."""
    return lazytpu.device_count()


local_device_count = addressable_device_count = global_device_count
global_runtime_device_count = addressable_runtime_device_count = global_device_count


def global_ordinal() -> int:
    """The number of this process."""
    return 0


local_ordinal = process_index = host_index = global_ordinal


def runtime_device_attributes(device: str) -> dict[str, object]:
    """What is known of a device."""
    return {"name": str(device), "kind": xla_model.xla_device_kind()}


def global_runtime_device_attributes() -> list[dict[str, object]]:
    """What is known of each device."""
    return [runtime_device_attributes(name) for name in xla_model.xla_real_devices()]


def is_spmd() -> bool:
    """Whether tensors are sharded over devices."""
    return False


def use_spmd(auto: bool | None = False) -> None:
    """Does nothing on one device, which holds whole tensors."""


def get_master_ip() -> str:
    """Where the first process is."""
    return "localhost"


def initialize_cache(path: str, readonly: bool = False) -> None:
    """Keeps compiled graphs in a folder, for the next process.

    Raises:
        ValueError: ``readonly``; see `lazytpu.config` for what the disk cache can do.
    """
    if readonly:
        raise ValueError("readonly: the disk cache is written, too; set LAZYTPU_DISK_CACHE=0 to have none")
    lazytpu.config.disk_cache_dir = path
    lazytpu.config.disk_cache = True


def get_num_cached_compilation_graph() -> int:
    """How many graphs were compiled or loaded."""
    return lazytpu.metrics.counter("compile") + lazytpu.metrics.counter("disk_hit")
