"""What DTensor does beside the steps of a training: splits what one rank has, and gathers what all have.

``distribute_tensor`` and ``parallelize_module`` go through the host, once for a model: on the device each parameter
would be a program of its own, and another one on the rank that sends.

What is gathered over a part of the ranks is gathered at once.  Often only one rank reads it, which starts what is
recorded there and not on the others; programs that have different ranks as members would wait for each other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType

import torch
import torch.distributed as dist

from lazytpu.dispatch import exchange
from lazytpu.distributed.ddp import during, through_host
from lazytpu.ir.op_schema import Arg
from lazytpu.torch_backend.after_import import after_import
from lazytpu.tracing.record import is_device_tensor

Tensor = torch.Tensor
_MODULE = "torch.distributed.tensor.placement_types"
_TENSOR, _STATES = "torch.distributed.tensor._api", "torch.distributed._state_dict_utils"
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


def _gathered(gather: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that gathers a DTensor, and starts what is recorded if not all ranks take part in it."""

    @functools.wraps(gather)
    def call(tensor: Arg, *args: Arg, **kwargs: Arg) -> Tensor:
        found = gather(tensor, *args, **kwargs)
        mesh = tensor.device_mesh
        if tensor.dim() and is_device_tensor(found) and (mesh.ndim > 1 or mesh.size() < dist.get_world_size()):
            exchange.settle()
        return found

    return call


def _gather_whole(module: ModuleType) -> None:
    tensor: Arg = vars(module)["DTensor"]
    tensor.full_tensor = _gathered(tensor.full_tensor)


def _gather_states(module: ModuleType) -> None:
    name, of_dtensors = "_iterate_state_dict", 2
    iterate: Callable[..., Arg] = vars(module)[name]

    @functools.wraps(iterate)
    def call(*args: Arg, **kwargs: Arg) -> Arg:
        if len(args) > of_dtensors and not hasattr(args[of_dtensors], "__wrapped__"):
            args = (*args[:of_dtensors], _gathered(args[of_dtensors]), *args[of_dtensors + 1 :])
        return iterate(*args, **kwargs)

    setattr(module, name, call)


def register() -> None:
    """Wait for DTensor, and for what gathers states, to be imported."""
    after_import(_MODULE, _register)
    after_import(_TENSOR, _gather_whole)
    after_import(_STATES, _gather_states)
