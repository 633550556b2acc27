"""``torch_xla.distributed.fsdp``: parameters split over all devices, by `lazytpu.spmd.fully_shard`."""

from lazytpu.compat import names
from lazytpu.compat.torch_xla.distributed.fsdp.state_dict_utils import (
    consolidate_sharded_model_checkpoints,
    consolidate_sharded_state_dicts,
)
from lazytpu.compat.torch_xla.distributed.fsdp.utils import checkpoint_module
from lazytpu.compat.torch_xla.distributed.fsdp.xla_fully_sharded_data_parallel import XlaFullyShardedDataParallel

__getattr__ = names.missing_from(__name__)
__all__ = [
    "XlaFullyShardedDataParallel",
    "checkpoint_module",
    "consolidate_sharded_model_checkpoints",
    "consolidate_sharded_state_dicts",
]
