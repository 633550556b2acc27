"""Collectives of the device's groups, counted by torch's ``CommDebugMode`` like those of other backends.

Torch's groups pass an op of ``c10d`` through the dispatcher, where the mode sees it; the device's are called directly.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

import torch

from lazytpu.ir.op_schema import Arg

_MODE = "torch.distributed.tensor.debug._comm_mode"
_OPS = {
    "allreduce": "allreduce_",
    "allreduce_coalesced": "allreduce_coalesced_",
    "reduce": "reduce_",
    "reduce_scatter": "reduce_scatter_",
    "reduce_scatter_single": "_reduce_scatter_base_",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced_",
    "allgather": "allgather_",
    "allgather_coalesced": "allgather_coalesced_",
    "all_gather_single": "_allgather_base_",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced_",
    "gather": "gather_",
    "broadcast": "broadcast_",
    "scatter": "scatter_",
    "alltoall": "alltoall_",
    "all_to_all_single": "alltoall_base_",
}
_inside = False  # of a collective that another one consists of


def register(group: type) -> None:
    """Let the collectives of a class of process groups be counted."""
    for name, op in _OPS.items():
        counted = _counted(vars(group)[name], op)
        for other, method in list(vars(group).items()):
            if method is vars(group)[name] and other != name:
                setattr(group, other, counted)  # what torch called it before
        setattr(group, name, counted)


def _counted(method: Callable[..., Arg], op: str) -> Callable[..., Arg]:
    @functools.wraps(method)
    def call(*args: Arg, **kwargs: Arg) -> Arg:
        global _inside
        if _inside or not torch._C._len_torch_dispatch_stack():
            return method(*args, **kwargs)
        _tell(op)
        _inside = True
        try:
            return method(*args, **kwargs)
        finally:
            _inside = False

    return call


def _tell(name: str) -> None:
    """Count an op in each mode that is on, and in the module that runs and those around it."""
    module = sys.modules.get(_MODE)
    if module is None:
        return
    op = getattr(torch.ops.c10d, name)
    for mode in torch.utils._python_dispatch._get_current_dispatch_mode_stack():
        if isinstance(mode, module.CommDebugMode):
            mode.comm_counts[op] += 1
            tracker = mode.advanced_module_tracker
            way = "backward" if tracker.is_bw else "forward"
            for of in {tracker.name, *tracker.module_parents_dict[tracker.name]}:
                counts = mode.comm_module_counts.setdefault(of, {})
                for direction in ("forward", "backward"):
                    counts.setdefault(direction, module.defaultdict(int))
                counts[way][op] += 1
