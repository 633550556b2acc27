"""``torch_xla.amp``: torch's own automatic mixed precision, for the device."""

from __future__ import annotations

import torch
from torch.types import Device

import lazytpu
from lazytpu.compat import names
from lazytpu.compat.torch_xla.amp import syncfree

__getattr__ = names.missing_from(__name__)


class autocast(torch.amp.autocast):
    """``torch.autocast`` for the device: bfloat16, or float16 where that is asked for."""

    def __init__(
        self, device: Device = None, enabled: bool = True, dtype: torch.dtype | None = None, cache_enabled: bool = True
    ) -> None:
        kind = torch.device(device).type if device is not None else lazytpu.device().type
        super().__init__(kind, dtype=dtype or torch.bfloat16, enabled=enabled, cache_enabled=cache_enabled)


class GradScaler(torch.amp.GradScaler):
    """``torch.amp.GradScaler`` for the device."""

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        use_zero_grad: bool = False,
    ) -> None:
        super().__init__(lazytpu.device().type, init_scale, growth_factor, backoff_factor, growth_interval, enabled)


__all__ = ["GradScaler", "autocast", "syncfree"]
