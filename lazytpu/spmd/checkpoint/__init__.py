"""Checkpoints of the global view: ``torch.distributed.checkpoint``, with each part of a tensor saved once.

    from lazytpu.spmd import checkpoint

    state = {"model": model.state_dict(), "step": 100}
    checkpoint.save(state, "step-100")
    checkpoint.load(state, "step-100")        # on any mesh, or on none

The files are those of ``torch.distributed.checkpoint``: programs without lazytpu load them with its own ``load``.  The
package is imported at its first use, because torch's takes seconds.
"""

from lazytpu.spmd.checkpoint.manager import CheckpointManager
from lazytpu.spmd.checkpoint.planners import LoadPlanner, SavePlanner
from lazytpu.spmd.checkpoint.saving import async_save, gather, load, save

__all__ = ["CheckpointManager", "LoadPlanner", "SavePlanner", "async_save", "gather", "load", "save"]
