"""What torch calls ``torch.tpu``: this module, registered under the device's name.

It has the functions that ``torch.cuda`` and the other device modules have, as far as they mean something for
one device with one queue.  Code that asks ``torch.get_device_module()`` or ``torch.accelerator`` finds them.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from lazytpu import random
from lazytpu.config import config
from lazytpu.runtime import client
from lazytpu.torch_backend import fork, rank_device
from lazytpu.torch_backend.device import device_count as device_count
from lazytpu.torch_backend.device import is_available as is_available
from lazytpu.torch_backend.streams import Event as Event
from lazytpu.torch_backend.streams import Stream
from lazytpu.tracing.step import wait

Device = torch.device | str | int | None

_initialized = True  # torch looks for it


def check_index(device: Device) -> int:
    """Return the index of this process's device, 0; its local rank is another name for it.

    Raises:
        ValueError: ``device`` is of another kind.
        RuntimeError: there is no device of this index, or it is another process's.
    """
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device):
        if device.type != config.device_name:
            raise ValueError(f"expected a {config.device_name} device, but got {device}")
        device = device.index
    if not rank_device.is_own(device):
        raise RuntimeError(f"invalid device ordinal: {rank_device.refused(device)}")
    return 0


def init() -> None:
    """Do nothing: jax starts with the first op."""


_lazy_init = init


def is_initialized() -> bool:
    """Return True."""
    return True


_is_in_bad_fork = fork.in_child


def current_device() -> int:
    """Return the index of the current device: 0."""
    return 0


def set_device(device: Device) -> None:
    """Check that the device exists."""
    check_index(device)


def _exchange_device(index: int) -> int:
    return 0


_maybe_exchange_device = _exchange_device


class device:
    """``with torch.tpu.device(0):``, for code written for several devices."""

    def __init__(self, device: Device) -> None:
        self.index = check_index(device)

    def __enter__(self) -> device:
        return self

    def __exit__(self, *_: object) -> None:
        return None


class device_of(device):
    """``with torch.tpu.device_of(tensor):``."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(None)


# --- queue ---------------------------------------------------------------------------------------------------

_stream = Stream()


def synchronize(device: Device = None) -> None:
    """Run what is pending and wait until the device has finished."""
    check_index(device)
    wait()


def current_stream(device: Device = None) -> Stream:
    """Return the device's one queue."""
    check_index(device)
    return _stream


default_stream = current_stream


def stream(stream: Stream | None) -> Stream:
    """Return a context in which ops go to ``stream``, the only one there is."""
    return stream or _stream


StreamContext = stream


def set_stream(stream: Stream) -> None:
    """Do nothing: there is one queue."""


# --- properties -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """What is known of the device.

    Attributes:
        name: with the kind of hardware that jax reports.
        total_memory: bytes.
        platform: ``cpu``, ``gpu`` or ``tpu``.
    """

    name: str
    total_memory: int
    platform: str


def is_current_stream_capturing() -> bool:
    """Return False: what is recorded is a graph anyway, and never captured from a stream."""
    return False


def get_device_name(device: Device = None) -> str:
    """``lazytpu on cpu``, with jax's name of the hardware."""
    check_index(device)
    return f"lazytpu on {client.device().device_kind}"


def get_device_properties(device: Device = None) -> DeviceProperties:
    """Name, memory and platform of the device."""
    return DeviceProperties(get_device_name(device), client.memory_limit(), client.platform())


def get_device_capability(device: Device = None) -> tuple[int, int]:
    """``(1, 0)``: XLA has no such number."""
    check_index(device)
    return 1, 0


def get_amp_supported_dtype() -> list[torch.dtype]:
    """Return the dtypes ``torch.autocast`` may cast to."""
    return [torch.bfloat16, torch.float16]


def is_bf16_supported(including_emulation: bool = True) -> bool:
    """Return True."""
    return True


# --- memory ---------------------------------------------------------------------------------------------------


def memory_allocated(device: Device = None) -> int:
    """Return the bytes of buffers alive on the device."""
    check_index(device)
    return client.memory_allocated()


def max_memory_allocated(device: Device = None) -> int:
    """Most bytes in use at one time, where the platform reports it (a GPU or TPU); else `memory_allocated`."""
    check_index(device)
    return client.memory_peak()


memory_reserved, max_memory_reserved = memory_allocated, max_memory_allocated
memory_cached, max_memory_cached = memory_allocated, max_memory_allocated  # as torch.cuda called them once


def memory_stats(device: Device = None) -> OrderedDict[str, int]:
    """`memory_allocated` and its peak under the names that ``torch.accelerator`` uses."""
    now, peak = memory_allocated(device), max_memory_allocated(device)
    kinds = ("allocated_bytes", "reserved_bytes")
    return OrderedDict((f"{kind}.all.{what}", n) for kind in kinds for what, n in (("current", now), ("peak", peak)))


def mem_get_info(device: Device = None) -> tuple[int, int]:
    """Return the bytes free, and all that there are."""
    total = client.memory_limit()
    return total - memory_allocated(device), total


def empty_cache() -> None:
    """Do nothing: XLA keeps its own pool, which cannot be told to shrink."""


ipc_collect = empty_cache
OutOfMemoryError = torch.OutOfMemoryError


def reset_peak_memory_stats(device: Device = None) -> None:
    """Do nothing: XLA's peak counts from the start of the process."""
    check_index(device)


reset_accumulated_memory_stats = reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats


def memory_summary(device: Device = None, abbreviated: bool = False) -> str:
    """Return `memory_allocated`, its peak and what there is, in words."""
    now, peak, limit = (
        f"{n / 2**20:,.1f} MiB" for n in (memory_allocated(device), client.memory_peak(), client.memory_limit())
    )
    return f"{config.device_name}: {now} allocated, {peak} at most, of {limit}"


# --- random numbers -----------------------------------------------------------------------------------------------

manual_seed = manual_seed_all = random.manual_seed
seed = seed_all = random.seed
initial_seed = random.initial_seed


def get_rng_state(device: Device = None) -> torch.Tensor:
    """Seed and counter of the device's generator, a CPU ``uint8`` tensor."""
    check_index(device)
    return random.get_rng_state()


def set_rng_state(new_state: torch.Tensor, device: Device = None) -> None:
    """Restore what `get_rng_state` returned."""
    check_index(device)
    random.set_rng_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    """Return the state of every device."""
    return [random.get_rng_state()]


def set_rng_state_all(new_states: Sequence[torch.Tensor]) -> None:
    """Restore what `get_rng_state_all` returned."""
    random.set_rng_state(new_states[0])


# --- mixed precision --------------------------------------------------------------------------------------------


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for this device."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(config.device_name, *args, **kwargs)


class autocast(torch.autocast):
    """``torch.autocast`` for this device."""

    def __init__(self, enabled: bool = True, dtype: torch.dtype | None = None, cache_enabled: bool = True) -> None:
        super().__init__(config.device_name, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)


amp = ModuleType("torch.tpu.amp", "Mixed precision under the names of ``torch.cuda.amp``.")
amp.__dict__.update(
    GradScaler=GradScaler,
    autocast=autocast,
    custom_fwd=functools.partial(torch.amp.custom_fwd, device_type=config.device_name),
    custom_bwd=functools.partial(torch.amp.custom_bwd, device_type=config.device_name),
)
