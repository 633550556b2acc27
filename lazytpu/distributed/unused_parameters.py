"""What DistributedDataParallel does about parameters that a step does not use.

Ranks tell each other which parameters they have used, in the middle of the backward pass, and read it at once: on the
device that would cut each step, so it goes through the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lazytpu.ir.op_schema import Arg, aten

Tensor = torch.Tensor
_maps: set[int] = set()  # addresses


def is_map(x: Tensor) -> bool:
    """Return whether a tensor of the host says which parameters have been used."""
    return x.dtype is torch.int32 and x.data_ptr() in _maps


class UsedOnHost(TorchDispatchMode):
    """Keeps on the host which parameters a rank has used, while a reducer allocates what it needs."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Arg],
        types: object,
        args: tuple[Arg, ...] = (),
        kwargs: Mapping[str, Arg] | None = None,
    ) -> Arg:
        settings = dict(kwargs or {})
        if func is not aten.empty.memory_format or settings.get("dtype") is not torch.int32:
            return func(*args, **settings)
        made = func(*args, **settings | {"device": torch.device("cpu")})
        _maps.add(made.data_ptr())
        return made
