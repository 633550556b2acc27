"""Libraries of transport, manifolds, rotations, tensors, splines, wavelets, evolution and measures of pictures."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.ecosystem.case import Library, Numbers
from tests.ecosystem.steps import drawn, fit


def _first(x: torch.Tensor) -> float:
    """Return a sum in which each element has its own weight."""
    flat = torch.view_as_real(x).flatten() if x.is_complex() else x.flatten()
    return float(flat.detach().cpu().double() @ torch.linspace(0.5, 1.5, len(flat), dtype=torch.float64))


def transport(device: torch.device) -> Numbers:
    """Compute distances of two sets of points, with their gradients."""
    import geomloss
    import ot

    a, b, found = drawn(0, 20, 2).to(device).requires_grad_(), drawn(1, 25, 2).to(device), {}
    for kind in ("sinkhorn", "gaussian", "energy", "laplacian"):
        a.grad = None
        distance = geomloss.SamplesLoss(kind, p=2, blur=0.1, backend="tensorized")(a, b)
        distance.backward()
        assert a.grad is not None
        found |= {kind: distance.item(), f"gradient of {kind}": a.grad.abs().sum().item()}
    shares = [torch.full((n,), 1 / n, device=device) for n in (20, 25)]
    costs = ot.dist(a.detach(), b)
    return {**found, "POT": ot.sinkhorn2(*shares, costs, 1.0).sum().item(), "exact": ot.emd2(*shares, costs).item()}


def rotated(device: torch.device) -> Numbers:
    import roma

    turns = F.normalize(drawn(0, 4, 4), dim=-1).to(device).requires_grad_()
    vectors = roma.rotmat_to_rotvec(roma.unitquat_to_rotmat(turns))
    vectors.sum().backward()
    assert turns.grad is not None
    between = roma.unitquat_slerp(turns.detach(), turns.detach().flip(0), torch.linspace(0, 1, 3, device=device))
    nearest = roma.special_procrustes(drawn(0, 3, 3, 3).to(device))
    return {
        "vectors": _first(vectors), "gradient": turns.grad.abs().sum().item(), "between": _first(between),
        "nearest": _first(nearest),
    }  # fmt: skip


def manifolds(device: torch.device) -> Numbers:
    """Train points of the Poincaré ball, and a frame."""
    import geoopt

    ball, found = geoopt.PoincareBall(), {}
    goal = ball.expmap0(drawn(1, 5, 3) * 0.1).to(device)
    points = geoopt.ManifoldParameter(ball.expmap0(drawn(0, 5, 3) * 0.1).to(device), manifold=ball)
    frame = geoopt.ManifoldParameter(torch.linalg.qr(drawn(0, 4, 2))[0].to(device), manifold=geoopt.Stiefel())
    weights = drawn(3, 4, 2).to(device)
    for name, held, loss in (
        ("ball", points, lambda: ball.dist2(points, goal).sum()), ("frame", frame, lambda: (frame * weights).sum()),
    ):  # fmt: skip
        for kind in (geoopt.optim.RiemannianAdam, geoopt.optim.RiemannianSGD):
            holder = nn.ParameterList([held])
            found[f"{name}, {kind.__name__}"] = fit(holder, loss, make=lambda p, kind=kind: kind(p, lr=0.05))
    return found


def tensors(device: torch.device) -> Numbers:
    import tensorly
    from tensorly.decomposition import non_negative_parafac, parafac, tensor_train, tucker

    tensorly.set_backend("pytorch")
    x = drawn(0, 6, 5, 4).sigmoid().to(device)
    return {
        "CP": _first(tensorly.cp_to_tensor(parafac(x, 2, init="svd", n_iter_max=10))),
        "Tucker": _first(tensorly.tucker_to_tensor(tucker(x, [2, 2, 2], n_iter_max=5))),
        "train": _first(tensorly.tt_to_tensor(tensor_train(x, [1, 2, 2, 1]))),
        "positive": _first(tensorly.cp_to_tensor(non_negative_parafac(x, 2, init="svd", n_iter_max=5))),
    }


class _Field(nn.Module):
    """A vector field for a path of three channels."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 12)

    def forward(self, t: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(z)
        return out.tanh().view(*z.shape[:-1], 4, 3)


def paths(device: torch.device) -> Numbers:
    """Solve a differential equation that a path controls, for three kinds of splines."""
    import torchcde

    x = torch.cat([torch.linspace(0, 1, 6).repeat(3, 1)[..., None], drawn(0, 3, 6, 2)], -1).to(device)
    torch.manual_seed(0)
    field, found = _Field().to(device), {}
    kinds: dict[str, Any] = {
        "Hermite": lambda: torchcde.CubicSpline(torchcde.hermite_cubic_coefficients_with_backward_differences(x)),
        "natural": lambda: torchcde.CubicSpline(torchcde.natural_cubic_coeffs(x)),
        "linear": lambda: torchcde.LinearInterpolation(torchcde.linear_interpolation_coeffs(x)),
    }
    for name, kind in kinds.items():
        path, start = kind(), torch.ones(3, 4, device=device)
        how = {"adjoint": False, "method": "rk4", "options": {"step_size": 0.5}}
        end = torchcde.cdeint(X=path, func=field, z0=start, t=path.interval, **how).sum()
        end.backward()
        found[name] = end.item()
    assert field.layer.weight.grad is not None
    return {**found, "gradient": field.layer.weight.grad.abs().sum().item()}


def evolution(device: torch.device) -> Numbers:
    """Search by four strategies; the points are random, so only that they come nearer is compared."""
    from evotorch import Problem
    from evotorch.algorithms import CEM, CMAES, PGPE, SNES

    found = {}
    sizes: dict[Any, dict[str, float]] = {
        SNES: {"stdev_init": 1.0, "popsize": 10}, CEM: {"stdev_init": 1.0, "popsize": 10, "parenthood_ratio": 0.5},
        PGPE: {"stdev_init": 1.0, "popsize": 10, "center_learning_rate": 0.1, "stdev_learning_rate": 0.1},
        CMAES: {"stdev_init": 1.0, "popsize": 8},
    }  # fmt: skip
    for kind, options in sizes.items():
        problem = Problem(
            "min", lambda x: x.square().sum(-1), solution_length=4, initial_bounds=(-1, 1), vectorized=True,
            device=str(device), seed=1,
        )  # fmt: skip
        search = kind(problem, **options)
        for _ in range(6):
            search.step()
        found[kind.__name__] = float(float(search.status["mean_eval"]) < 60)
    return found


LIBRARIES = [
    Library("geomloss", "with POT: distances of points and their gradients", transport, rtol=1e-3, needs=("POT",)),
    Library("roma", "rotations: quaternions, vectors, slerp, Procrustes", rotated, rtol=1e-3),
    Library("geoopt", "points of the Poincaré ball and a frame trained", manifolds, rtol=1e-3),
    Library("tensorly", "CP, Tucker, tensor trains", tensors, rtol=1e-3),
    Library("torchcde", "an equation controlled by three kinds of splines", paths, rtol=1e-3),
    Library("evotorch", "SNES, CEM, PGPE and CMA-ES", evolution),
]
