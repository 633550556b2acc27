"""``distribute_tensor`` and ``parallelize_module``, which split what one rank has: through the host, once for a model.

On the device each parameter would be a program of its own, and another one on the rank that sends.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType

import torch

from lazytpu.distributed.ddp import during, through_host
from lazytpu.ir.op_schema import Arg
from lazytpu.torch_backend.after_import import after_import
from lazytpu.tracing.record import is_device_tensor

Tensor = torch.Tensor
_MODULE = "torch.distributed.tensor.placement_types"
_SPLIT, _COPY = "_shard_tensor", "_make_replicate_tensor"


def _from_host(split: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(split)
    def call(self: Arg, tensor: Tensor, mesh: Arg, mesh_dim: int, src_data_rank: int | None = 0) -> Tensor:
        if src_data_rank is None or not is_device_tensor(tensor):
            return split(self, tensor, mesh, mesh_dim, src_data_rank)
        return split(self, tensor.cpu(), mesh, mesh_dim, src_data_rank).to(tensor.device)

    return call


def _register(module: ModuleType) -> None:
    for name in ("Shard", "_StridedShard"):
        placement = vars(module).get(name)
        if placement is not None and _SPLIT in vars(placement):
            setattr(placement, _SPLIT, _from_host(vars(placement)[_SPLIT]))
    replicate = vars(module)["Replicate"]
    if isinstance(vars(replicate).get(_COPY), classmethod):
        setattr(replicate, _COPY, classmethod(during(through_host, vars(replicate)[_COPY].__func__)))


def register() -> None:
    """Wait for DTensor to be imported."""
    after_import(_MODULE, _register)


__all__ = ["register"]
