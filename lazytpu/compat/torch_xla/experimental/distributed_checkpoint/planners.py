"""The planners of `lazytpu.spmd.checkpoint`, which tell what is split from what is not."""

from __future__ import annotations

from torch.distributed.checkpoint.planner import LoadPlan

from lazytpu.spmd import checkpoint
from lazytpu.spmd.checkpoint.planners import LoadedTensor, SavedTensor

State = dict[str, object]


def _is_split(x: object) -> bool:
    return isinstance(x, (SavedTensor, LoadedTensor)) and x.is_split


class SPMDSavePlanner(checkpoint.SavePlanner):
    """See `lazytpu.spmd.checkpoint.SavePlanner`."""

    @property
    def sharded_state_dict(self) -> State:
        """What is split over devices, by its name in the checkpoint."""
        return {name: x for name, x in self.state_dict.items() if _is_split(x)}

    @property
    def unsharded_state_dict(self) -> State:
        """The rest."""
        return {name: x for name, x in self.state_dict.items() if not _is_split(x)}


class SPMDLoadPlanner(checkpoint.LoadPlanner):
    """See `lazytpu.spmd.checkpoint.LoadPlanner`."""

    sharded_state_dict = SPMDSavePlanner.sharded_state_dict
    unsharded_state_dict = SPMDSavePlanner.unsharded_state_dict

    def create_local_plan(self) -> LoadPlan:
        """Return what is to be read; what is committed counts from here on."""
        return self.finish_plan(super().create_local_plan())
