"""``torch_xla.experimental.distributed_checkpoint``: `lazytpu.spmd.checkpoint` under the names there."""

from lazytpu.compat import names
from lazytpu.compat.torch_xla.experimental.distributed_checkpoint.manager import CheckpointManager
from lazytpu.compat.torch_xla.experimental.distributed_checkpoint.planners import SPMDLoadPlanner, SPMDSavePlanner
from lazytpu.compat.torch_xla.experimental.distributed_checkpoint.prime import prime_optimizer

__getattr__ = names.missing_from(__name__)
__all__ = ["CheckpointManager", "SPMDLoadPlanner", "SPMDSavePlanner", "prime_optimizer"]
