"""``torch_xla.distributed.spmd``: one program over many devices, under the names there."""

from lazytpu.compat import names
from lazytpu.compat.torch_xla.distributed.spmd import xla_sharding
from lazytpu.compat.torch_xla.distributed.spmd.api import auto_policy, xla_distribute_module, xla_distribute_tensor
from lazytpu.compat.torch_xla.distributed.spmd.xla_sharding import *  # noqa: F403
from lazytpu.compat.torch_xla.experimental import dynamo_mark_sharding as _  # noqa: F401  # registers the op

__getattr__ = names.missing_from(__name__)

__all__ = [*xla_sharding.__all__, "auto_policy", "xla_distribute_module", "xla_distribute_tensor"]
