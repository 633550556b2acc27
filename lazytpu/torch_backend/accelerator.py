"""``torch.accelerator`` for this device.

Torch asks its C++ hooks, of which Python can set only a few; the others are the functions of ``torch._C``
that ``torch.accelerator`` calls.  Once a device holds PrivateUse1, torch takes it for the accelerator of the
process, so these functions concern no other device.
"""

from __future__ import annotations

from typing import Any

import torch

from lazytpu.config import config
from lazytpu.dtypes import supported
from lazytpu.torch_backend import hook_errors
from lazytpu.torch_backend import torch_module as module
from lazytpu.torch_backend.hook_errors import take_pending

_libraries: list[torch.library.Library] = []


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return True

    def has_primary_context(self, index: int) -> bool:
        return True

    def is_built(self) -> bool:
        return True


class _DeviceGuard(torch._C._acc.DeviceGuard):
    def type_(self) -> Any:
        take_pending()
        return torch._C._autograd.DeviceType.PrivateUse1


def _pin_memory(tensor: torch.Tensor, device: torch.device | None = None) -> torch.Tensor:
    """Return what pins a CPU tensor: a copy of it.  XLA's transfers gain nothing from page-locked memory.

    The copy says that it is pinned, as do its views, and is pinned no second time: FSDP would go on with two copies.
    """
    if device is not None and device.type != config.device_name:
        raise RuntimeError(f"cannot pin memory for {device}: the accelerator of this process is {config.device_name}")
    pinned = tensor.clone()
    vars(pinned.untyped_storage())["_is_pinned"] = True
    return pinned


def _is_pinned(tensor: torch.Tensor, device: torch.device | None = None) -> bool:
    """Return whether a CPU tensor lies in what `_pin_memory` gave."""
    return hasattr(tensor.untyped_storage(), "_is_pinned") and (device is None or device.type == config.device_name)


_FUNCTIONS = {
    "_accelerator_synchronizeDevice": module.synchronize,
    "_accelerator_setDeviceIndex": module.set_device,
    "_accelerator_getDeviceCapability": lambda index: {"supported_dtypes": supported()},
    "_accelerator_isAllocatorInitialized": module.is_initialized,
    "_accelerator_emptyCache": module.empty_cache,
    "_accelerator_emptyHostCache": module.empty_cache,
    "_accelerator_getDeviceStats": module.memory_stats,
    "_accelerator_resetAccumulatedStats": module.reset_accumulated_memory_stats,
    "_accelerator_resetPeakStats": module.reset_peak_memory_stats,
    "_accelerator_getMemoryInfo": module.mem_get_info,
}


def register() -> None:
    """Make the device the accelerator of ``torch.accelerator``."""
    torch._C._acc.register_python_privateuseone_hook(_Hooks())
    torch._C._acc.register_python_privateuseone_device_guard(_DeviceGuard())
    hook_errors.register()
    library = torch.library.Library("aten", "IMPL")
    library.impl("_pin_memory", _pin_memory, "CPU")
    library.impl("is_pinned", _is_pinned, "CPU")
    _libraries.append(library)
    for name, function in _FUNCTIONS.items():
        if hasattr(torch._C, name):  # torch 2.10 lacks some
            setattr(torch._C, name, function)
