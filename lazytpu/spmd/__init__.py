"""One program over many devices: tensors with shardings, and jax's partitioner, which divides the work.

    mesh = lazytpu.spmd.Mesh((2, 4), ("data", "model"))
    lazytpu.spmd.mark_sharding(x, mesh, ("data", None))
    lazytpu.spmd.mark_sharding(model.up.weight, mesh, ("model", None))

What is recorded afterwards is compiled for all devices of the mesh; the script stays one for one device.
"""

import importlib as _importlib
from types import ModuleType as _Module

from lazytpu.spmd.marking import (
    LocalShard,
    Sharding,
    clear_sharding,
    local_shards,
    mark_sharding,
    replicate,
    sharding_of,
)
from lazytpu.spmd.mesh import HybridMesh, Mesh, use
from lazytpu.spmd.parallelize import parallelize
from lazytpu.spmd.parts import (
    all_gather,
    all_reduce,
    all_to_all,
    axis_index,
    permute,
    reduce_scatter,
    shard_map,
)
from lazytpu.spmd.plan import plan
from lazytpu.spmd.recipes import data_parallel, fully_shard
from lazytpu.spmd.safetensors import load_safetensors
from lazytpu.spmd.visualize import visualize


def __getattr__(name: str) -> _Module:
    """Import `lazytpu.spmd.checkpoint` when it is asked for: torch's package below it takes seconds."""
    if name == "checkpoint":
        return _importlib.import_module("lazytpu.spmd.checkpoint")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "HybridMesh",
    "LocalShard",
    "Mesh",
    "Sharding",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "axis_index",
    "clear_sharding",
    "data_parallel",
    "fully_shard",
    "load_safetensors",
    "local_shards",
    "mark_sharding",
    "parallelize",
    "permute",
    "plan",
    "reduce_scatter",
    "replicate",
    "shard_map",
    "sharding_of",
    "use",
    "visualize",
]
