"""Libraries of derivatives, curvature and optimization beyond gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.ecosystem.case import Library, Numbers
from tests.ecosystem.steps import drawn, fit


def _net(device: torch.device) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).to(device)


def _data(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return drawn(0, 32, 8).to(device), (torch.arange(32) % 3).to(device)


def inner_loops(device: torch.device) -> Numbers:
    """Differentiate through the steps of an optimizer."""
    import higher

    net, (x, y) = _net(device), _data(device)
    with higher.innerloop_ctx(net, torch.optim.SGD(net.parameters(), 0.1), copy_initial_weights=False) as (inner, made):
        for _ in range(3):
            made.step(F.cross_entropy(inner(x[:16]), y[:16]))
        loss = F.cross_entropy(inner(x[16:]), y[16:])
        loss.backward()
    return {"loss": loss.item(), "gradient": sum(p.grad.abs().sum().item() for p in net.parameters())}


def differentiable_optimizers(device: torch.device) -> Numbers:
    import torchopt

    net, (x, y) = _net(device), _data(device)
    meta = torchopt.MetaSGD(net, lr=0.1, momentum=0.9)
    for _ in range(2):
        meta.step(F.cross_entropy(net(x), y))
    found = {"MetaSGD": F.cross_entropy(net(x), y).item()}
    adamw = torchopt.FuncOptimizer(torchopt.adamw(1e-2))
    weights = tuple(p.detach().clone().requires_grad_() for p in _net(device).parameters())

    def loss(weights: tuple[torch.Tensor, ...]) -> torch.Tensor:
        hidden = F.linear(x, weights[0], weights[1]).relu()
        return F.cross_entropy(F.linear(hidden, weights[2], weights[3]), y)

    for _ in range(3):
        weights = adamw.step(loss(weights), weights)
    return found | {"adamw": loss(weights).item()}


def second_order(device: torch.device) -> Numbers:
    """Compute seven quantities of a batch beside its gradient, and products with matrices of curvature."""
    from backpack import backpack, extend
    from backpack.extensions import (
        KFRA,
        BatchGrad,
        BatchL2Grad,
        DiagGGNExact,
        DiagHessian,
        SumGradSquared,
        Variance,
    )  # fmt: skip
    from curvlinops import GGNLinearOperator, HessianLinearOperator

    x, y = _data(device)
    net, loss = extend(_net(device)), extend(nn.CrossEntropyLoss())
    kinds = (BatchGrad, Variance, DiagGGNExact, BatchL2Grad, SumGradSquared, KFRA, DiagHessian)
    with backpack(*(kind() for kind in kinds)):
        loss(net(x), y).backward()
    names = ("grad_batch", "variance", "diag_ggn_exact", "batch_l2", "sum_grad_squared", "diag_h")
    found = {name: getattr(net[0].weight, name).abs().sum().item() for name in names}
    plain = _net(device)
    for name, kind in {"Hessian": HessianLinearOperator, "Gauss-Newton": GGNLinearOperator}.items():
        operator = kind(plain, nn.CrossEntropyLoss(), list(plain.parameters()), [(x, y)])
        found[name] = (operator @ drawn(1, operator.shape[1]).to(device)).abs().sum().item()
    return found


def searched(device: torch.device) -> Numbers:
    """Search a learning rate and a width, with trials that are given up."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    x, y = _data(device)

    def trial_loss(trial: Any) -> float:
        rate, width = trial.suggest_float("rate", 1e-3, 1e-1, log=True), trial.suggest_int("width", 4, 8)
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 3)).to(device)
        optimizer = torch.optim.SGD(net.parameters(), rate)
        for step in range(3):
            loss = F.cross_entropy(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trial.report(loss.item(), step)
            if trial.should_prune():
                raise optuna.TrialPruned
        return loss.item()

    sampler, pruner = optuna.samplers.TPESampler(seed=0), optuna.pruners.MedianPruner(n_startup_trials=2)
    study = optuna.create_study(sampler=sampler, pruner=pruner)
    study.optimize(trial_loss, 8)
    return {"loss": study.best_value, "rate": study.best_params["rate"]}


def transport(device: torch.device) -> Numbers:
    """Compute distances of optimal transport between two clouds of points."""
    import ot

    a, b = drawn(0, 20, 2).to(device).requires_grad_(), drawn(1, 25, 2).to(device)
    p, q = torch.full((20,), 1 / 20, device=device), torch.full((25,), 1 / 25, device=device)
    exact = ot.emd2(p, q, ot.dist(a, b))
    (gradient,) = torch.autograd.grad(exact, a)
    costs = ot.dist(a.detach(), b)
    return {
        "exact": exact.item(),
        "gradient": gradient.abs().sum().item(),
        "sinkhorn": ot.sinkhorn2(p, q, costs, 0.5).item(),
        "logarithms": ot.sinkhorn(p, q, costs, 0.5, method="sinkhorn_log").sum().item(),
        "unbalanced": ot.unbalanced.sinkhorn_unbalanced2(p, q, costs, 0.5, 1.0).item(),
    }


def muon(device: torch.device) -> Numbers:
    from muon import SingleDeviceMuonWithAuxAdam

    net, (x, y) = _net(device), _data(device)

    def make(parameters: Any) -> torch.optim.Optimizer:
        matrices, others = [p for p in net.parameters() if p.ndim > 1], [p for p in net.parameters() if p.ndim < 2]
        first = {"params": matrices, "use_muon": True, "lr": 0.02, "weight_decay": 0.01}
        second = {"params": others, "use_muon": False, "lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.01}
        made: torch.optim.Optimizer = SingleDeviceMuonWithAuxAdam([first, second])
        return made

    return {"loss": fit(net, lambda: F.cross_entropy(net(x), y), 4, make)}


LIBRARIES = [
    Library("higher", "gradients through three steps of SGD", inner_loops, rtol=1e-3),
    Library("torchopt", "MetaSGD; AdamW as a function", differentiable_optimizers, rtol=1e-3),
    Library("backpack-for-pytorch", "with curvlinops: gradients of samples, variances, Hessians, Gauss-Newton",
            second_order, rtol=1e-3, needs=("curvlinops-for-pytorch",)),
    Library("optuna", "a rate and a width searched, with pruning", searched),
    Library("POT", "optimal transport: exact, Sinkhorn, unbalanced", transport, rtol=1e-3),
    Library("muon-optimizer", "Muon with Adam for biases", muon, rtol=1e-3),
]  # fmt: skip
