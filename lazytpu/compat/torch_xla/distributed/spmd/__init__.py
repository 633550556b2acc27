"""``torch_xla.distributed.spmd``: one program over many devices, under the names there."""

from lazytpu.compat import names
from lazytpu.compat.torch_xla.distributed.spmd.api import auto_policy, xla_distribute_module, xla_distribute_tensor
from lazytpu.compat.torch_xla.distributed.spmd.xla_sharded_tensor import ShardingType, XLAShard, XLAShardedTensor
from lazytpu.compat.torch_xla.distributed.spmd.xla_sharding import (
    HybridMesh,
    MarkShardingFunction,
    Mesh,
    ShardingSpec,
    XLAPatchedLinear,
    _mark_manual_sharding,
    annotate_custom_sharding,
    apply_backward_optimization_barrier,
    apply_xla_patch_to_nn_linear,
    clear_sharding,
    disable_manual_sharding,
    enable_manual_sharding,
    get_1d_mesh,
    get_global_mesh,
    mark_sharding,
    mark_sharding_with_gradients,
    set_global_mesh,
    shard_as,
    wrap_as_sharded_tensor,
    wrap_if_sharded,
    xla_patched_nn_linear_forward,
)
from lazytpu.compat.torch_xla.experimental import dynamo_mark_sharding as _  # noqa: F401  # registers the op

__getattr__ = names.missing_from(__name__)

__all__ = [
    "HybridMesh",
    "MarkShardingFunction",
    "Mesh",
    "ShardingSpec",
    "ShardingType",
    "XLAPatchedLinear",
    "XLAShard",
    "XLAShardedTensor",
    "_mark_manual_sharding",
    "annotate_custom_sharding",
    "apply_backward_optimization_barrier",
    "apply_xla_patch_to_nn_linear",
    "auto_policy",
    "clear_sharding",
    "disable_manual_sharding",
    "enable_manual_sharding",
    "get_1d_mesh",
    "get_global_mesh",
    "mark_sharding",
    "mark_sharding_with_gradients",
    "set_global_mesh",
    "shard_as",
    "wrap_as_sharded_tensor",
    "wrap_if_sharded",
    "xla_distribute_module",
    "xla_distribute_tensor",
    "xla_patched_nn_linear_forward",
]
