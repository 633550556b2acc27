"""Give an optimizer the state that a checkpoint is loaded into."""

from __future__ import annotations

import torch

import lazytpu


def prime_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Have an optimizer make its state, which it makes at its first step, and leave parameters as they are.

    Returns:
        The optimizer itself.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kept = [(p.detach().clone(), p.grad) for p in parameters]
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    with torch.no_grad():
        for p, (value, grad) in zip(parameters, kept, strict=True):
            p.copy_(value)
            p.grad = grad
    lazytpu.mark_step()
    return optimizer
