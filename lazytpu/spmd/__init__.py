"""One program over many devices: tensors with shardings, and jax's partitioner, which divides the work.

    mesh = lazytpu.spmd.Mesh((2, 4), ("data", "model"))
    lazytpu.spmd.mark_sharding(x, mesh, ("data", None))
    lazytpu.spmd.mark_sharding(model.up.weight, mesh, ("model", None))

What is recorded afterwards is compiled for all devices of the mesh; the script stays one for one device.
"""

from lazytpu.spmd.marking import (
    LocalShard,
    Sharding,
    clear_sharding,
    local_shards,
    mark_sharding,
    replicate,
    sharding_of,
)
from lazytpu.spmd.mesh import HybridMesh, Mesh
from lazytpu.spmd.parallelize import parallelize
from lazytpu.spmd.plan import plan
from lazytpu.spmd.recipes import data_parallel, fully_shard
from lazytpu.spmd.visualize import visualize

__all__ = [
    "HybridMesh",
    "LocalShard",
    "Mesh",
    "Sharding",
    "clear_sharding",
    "data_parallel",
    "fully_shard",
    "local_shards",
    "mark_sharding",
    "parallelize",
    "plan",
    "replicate",
    "sharding_of",
    "visualize",
]
