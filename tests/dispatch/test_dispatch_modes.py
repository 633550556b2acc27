"""A ``TorchDispatchMode`` of the user's sees the products that it sees on the CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

aten = torch.ops.aten


def test_flops_are_those_of_the_cpu(device: torch.device) -> None:
    counted = []
    for where in ("cpu", device):
        x, w, b = (torch.ones(s, device=where, requires_grad=True) for s in ((2, 3, 8), (5, 8), (5,)))
        with FlopCounterMode(display=False) as forward:
            F.linear(x, w, b)
        with FlopCounterMode(display=False) as both:
            F.linear(x, w, b).sum().backward()
        counted.append((forward.get_flop_counts(), both.get_flop_counts()))
    assert counted[0] == counted[1]


def test_selective_checkpointing_saves_the_products_it_is_asked_to(device: torch.device) -> None:
    products = []

    def policy(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        products.append(op is aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if products[-1] else CheckpointPolicy.PREFER_RECOMPUTE

    x, w, b = (torch.ones(s, device=device, requires_grad=True) for s in ((4, 8), (5, 8), (5,)))
    contexts = lambda: create_selective_checkpoint_contexts(policy)  # noqa: E731
    checkpoint(lambda x: F.linear(x, w, b).sin(), x, use_reentrant=False, context_fn=contexts).sum().backward()
    assert any(products) and torch.allclose(w.grad.cpu(), torch.full((5, 8), 4 * torch.tensor(9.0).cos()))
