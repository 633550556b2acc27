"""``torch_xla.distributed.spmd.xla_sharded_tensor``: what a marked tensor is there.

A tensor that is marked stays the tensor it is: `XLAShardedTensor` is no class of its own, but what a tensor with a
sharding is an instance of.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from types import EllipsisType

import torch

import lazytpu
from lazytpu import spmd
from lazytpu.compat import names
from lazytpu.runtime import meshes
from lazytpu.tensors.tensor import LazyTensor
from lazytpu.tracing.record import is_device_tensor
from lazytpu.tracing.sharding import sharding_of

__getattr__ = names.missing_from(__name__)


class ShardingType(IntEnum):
    """How a tensor is spread: each device has all of it, a part, or shares a part with some others."""

    REPLICATED = 0
    MAXIMAL = 1
    TUPLE = 2
    TILED = 3
    MANUAL = 4
    PARTIAL = 5
    UNKNOWN = 6


@dataclass(frozen=True)
class XLAShard:
    """The part of a tensor that a device of this process has.

    Attributes:
        data, unpadded_data: a copy on the CPU; parts are not padded here.
        indices: what of the tensor it is; ``...`` for all of it.
        shard_device: the device.
        replica_id: how many devices before it have the same part.
    """

    data: torch.Tensor
    indices: list[slice] | EllipsisType
    shard_device: str
    replica_id: int

    @property
    def unpadded_data(self) -> torch.Tensor:
        return self.data


class _Marked(type):
    def __instancecheck__(cls, x: object) -> bool:
        return isinstance(x, torch.Tensor) and is_device_tensor(x) and spmd.sharding_of(x) is not None

    def __call__(cls, *args: torch.Tensor) -> torch.Tensor:
        return args[0]


class XLAShardedTensor(metaclass=_Marked):
    """What a tensor with a sharding is an instance of; calling it returns the tensor."""


def sharding_type_of(tensor: torch.Tensor) -> ShardingType | None:
    """Return how a tensor is spread; None for one without a sharding."""
    found = spmd.sharding_of(tensor)
    if found is None:
        return None
    axes = dict(zip(found.mesh.axis_names, found.mesh.shape, strict=True))
    used = {str(name) for entry in found.spec if entry for name in (entry if isinstance(entry, tuple) else (entry,))}
    if all(axes[name] == 1 for name in used):
        return ShardingType.REPLICATED
    return ShardingType.PARTIAL if any(n > 1 and name not in used for name, n in axes.items()) else ShardingType.TILED


def sharding_spec_of(tensor: torch.Tensor) -> str:
    """Return how a tensor is spread as XLA writes it, such as ``{devices=[2,4]<=[8]}``; empty without a sharding."""
    found = sharding_of(tensor)
    return "" if found is None else meshes.hlo_sharding(found)


def local_shards_of(tensor: torch.Tensor) -> list[XLAShard]:
    """Return the parts of a tensor that this process has."""
    seen: dict[object, int] = {}
    found = []
    for shard in spmd.local_shards(tensor):
        at = tuple([(s.start, s.stop) for s in shard.index])
        seen[at] = seen.get(at, -1) + 1
        whole = all(s == (0, n) for s, n in zip(at, tensor.shape, strict=True))
        found.append(
            XLAShard(
                shard.data,
                ... if whole else list(shard.index),
                f"{lazytpu.platform().upper()}:{shard.device}",
                seen[at],
            )
        )
    return found


for _name, _of in (
    ("global_tensor", lambda tensor: tensor),
    ("local_shards", local_shards_of),
    ("sharding_type", sharding_type_of),
    ("sharding_spec", sharding_spec_of),
):
    setattr(LazyTensor, _name, property(_of))

__all__ = ["ShardingType", "XLAShard", "XLAShardedTensor", "local_shards_of", "sharding_spec_of", "sharding_type_of"]
