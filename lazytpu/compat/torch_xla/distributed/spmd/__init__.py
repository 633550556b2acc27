"""``torch_xla.distributed.spmd``: one program over many devices, under the names there."""

from lazytpu.compat import names
from lazytpu.compat.torch_xla.distributed.spmd.api import xla_distribute_module, xla_distribute_tensor
from lazytpu.compat.torch_xla.distributed.spmd.xla_sharded_tensor import ShardingType, XLAShard, XLAShardedTensor
from lazytpu.compat.torch_xla.distributed.spmd.xla_sharding import (
    HybridMesh,
    Mesh,
    ShardingSpec,
    XLAPatchedLinear,
    clear_sharding,
    get_1d_mesh,
    get_global_mesh,
    mark_sharding,
    mark_sharding_with_gradients,
    set_global_mesh,
    wrap_if_sharded,
    xla_patched_nn_linear_forward,
)

__getattr__ = names.missing_from(__name__)

__all__ = [
    "HybridMesh",
    "Mesh",
    "ShardingSpec",
    "ShardingType",
    "XLAPatchedLinear",
    "XLAShard",
    "XLAShardedTensor",
    "clear_sharding",
    "get_1d_mesh",
    "get_global_mesh",
    "mark_sharding",
    "mark_sharding_with_gradients",
    "set_global_mesh",
    "wrap_if_sharded",
    "xla_distribute_module",
    "xla_distribute_tensor",
    "xla_patched_nn_linear_forward",
]
