"""The state of a program as what is saved of it, which scripts make before a checkpoint is written."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch.utils._pytree import tree_map

from lazytpu.compat import names
from lazytpu.spmd.checkpoint.planners import SavedTensor as _CpuShards
from lazytpu.tracing.record import is_device_tensor
from lazytpu.tracing.sharding import sharding_of

__getattr__ = names.missing_from(__name__)

_T = TypeVar("_T")


def _is_sharded_tensor(x: object) -> bool:
    """Return whether something is split over devices: a tensor, or the parts of one."""
    if isinstance(x, _CpuShards):
        return x.is_split
    if not isinstance(x, torch.Tensor) or not is_device_tensor(x):
        return False
    found = sharding_of(x)
    return found is not None and not found.is_replicated


def _sharded_cpu_state_dict(state_dict: _T) -> _T:
    """Return a state on the CPU: of tensors that are split their parts, the others whole."""

    def of(x: object) -> object:
        if _is_sharded_tensor(x):
            assert isinstance(x, torch.Tensor)
            return _CpuShards(x, on_host=True)
        return x.cpu() if isinstance(x, torch.Tensor) else x

    found: _T = tree_map(of, state_dict)
    return found
