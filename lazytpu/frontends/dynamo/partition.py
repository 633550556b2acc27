"""Which values of the forward pass are saved for the backward pass, and which are computed again."""

from __future__ import annotations

import operator
from typing import Any

import torch


def partition(
    joint: torch.fx.GraphModule, *args: Any, **kwargs: Any
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Split a graph of both passes: with few values saved, as XLA fuses what is computed again.

    Random numbers are saved where `torch.utils.checkpoint` would draw them again: torch's way to draw the same ones
    twice knows no devices but its own.
    """
    # torch._functorch takes long to import, and is there when this is called
    from torch._functorch.partitioners import min_cut_rematerialization_partition, must_recompute
    from torch.utils.checkpoint import CheckpointPolicy

    for node in joint.graph.nodes:
        if must_recompute(node) and torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            for x in (node, *(user for user in node.users if user.target is operator.getitem)):
                x.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    parts: tuple[torch.fx.GraphModule, torch.fx.GraphModule] = min_cut_rematerialization_partition(
        joint, *args, **kwargs
    )
    return parts
