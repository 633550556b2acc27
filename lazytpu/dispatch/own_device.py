"""``x.to("tpu:1")`` where this process calls its device so: ``x`` itself, as it is there already.

Torch compares the number with that of the tensor, which is 0 in each process, and would copy on all ranks but one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._ops import OpOverload

from lazytpu.config import config
from lazytpu.ir.op_schema import Arg, aten
from lazytpu.runtime import world

_libraries: list[torch.library.Library] = []


def _numbered_from_zero(overload: OpOverload, index: int) -> Callable[..., Arg]:
    own, torchs = torch.device(config.device_name, index), torch.device(config.device_name, 0)

    def moved(*args: Arg, device: torch.device | None = None, **kwargs: Arg) -> Arg:
        if device is not None:
            kwargs["device"] = torchs if device == own else device
        return overload.decompose(*[torchs if isinstance(x, torch.device) and x == own else x for x in args], **kwargs)

    return moved


def register() -> None:
    """Take over both forms of `Tensor.to` that name a device, unless this process's number is 0."""
    index = world.local_rank()
    if not index or _libraries:
        return
    _libraries.append(torch.library.Library("aten", "IMPL"))
    for overload in (aten.to.device, aten.to.dtype_layout):
        for key in ("PrivateUse1", "AutogradPrivateUse1"):
            _libraries[0].impl(overload.name().removeprefix("aten::"), _numbered_from_zero(overload, index), key)
