"""Libraries of training loops, optimizers, losses and layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.ecosystem.case import Library, Numbers
from tests.ecosystem.steps import drawn, fit


def _net(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).to(device)


def _loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(drawn(0, 64, 8), torch.arange(64) % 3), 16)


def engines(device: torch.device) -> Numbers:
    """Train with Ignite, with an average of the weights; evaluate with five metrics."""
    from ignite.engine import create_supervised_evaluator, create_supervised_trainer
    from ignite.handlers import EMAHandler
    from ignite.metrics import Accuracy, ConfusionMatrix, Loss, Precision, Recall, RunningAverage

    model = _net(device)
    trainer = create_supervised_trainer(model, torch.optim.SGD(model.parameters(), 0.1), F.cross_entropy, device=device)
    RunningAverage(output_transform=lambda loss: loss, device=device).attach(trainer, "average")
    EMAHandler(model, momentum=0.1).attach(trainer)
    metrics: dict[str, Any] = {
        "accuracy": Accuracy(device=device), "loss": Loss(F.cross_entropy, device=device),
        "precision": Precision(average=True, device=device), "recall": Recall(average=True, device=device),
        "confusion": ConfusionMatrix(3, device=device),
    }  # fmt: skip
    evaluator = create_supervised_evaluator(model, metrics, device=device)
    trainer.run(_loader(), max_epochs=3)
    found = evaluator.run(_loader()).metrics
    found["confusion"] = (found["confusion"].cpu() * torch.arange(9.0).view(3, 3)).sum()
    return {name: float(found[name]) for name in metrics} | {"average": float(trainer.state.metrics["average"])}


def privacy(device: torch.device) -> Numbers:
    """Compute the gradients of samples, and train with them clipped."""
    from opacus import GradSampleModule, PrivacyEngine

    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv1d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(24, 3))
    samples = GradSampleModule(layers.to(device))
    F.cross_entropy(samples(drawn(0, 8, 1, 8).to(device)), (torch.arange(8) % 3).to(device)).backward()
    found = {name: p.grad_sample.abs().sum().item() for name, p in samples.named_parameters()}
    model = _net(device)
    model, optimizer, loader = PrivacyEngine(accountant="rdp").make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), data_loader=_loader(), noise_multiplier=0.0,
        max_grad_norm=1.0, poisson_sampling=False,
    )  # fmt: skip
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        optimizer.step()
    return {**found, "loss": loss.item()}


def _steps(device: torch.device, library: Any, names: str) -> Numbers:
    """Return the loss of a small network after three steps of each optimizer of a library."""
    x, y, found = drawn(0, 16, 8).to(device), (torch.arange(16) % 3).to(device), {}
    for name in names.split():
        model, kind = _net(device), getattr(library, name)
        loss = lambda model=model: F.cross_entropy(model(x), y)  # noqa: E731
        found[name] = fit(model, loss, make=lambda p, kind=kind: kind(p, lr=1e-2))
    return found


def many_optimizers(device: torch.device) -> Numbers:
    import pytorch_optimizer

    names = "AdaBelief Adan ADOPT CAME DAdaptAdam Grams Kron LaProp MADGRAD MARS Prodigy SOAP Shampoo StableAdamW Tiger"
    return _steps(device, pytorch_optimizer, names)


def older_optimizers(device: torch.device) -> Numbers:
    import torch_optimizer

    return _steps(device, torch_optimizer, "A2GradUni AdaBound AdamP Apollo LARS Lamb NovoGrad QHAdam Ranger Yogi")


def selfsupervised(device: torch.device) -> Numbers:
    from lightly.loss import BarlowTwinsLoss, DCLLoss, DINOLoss, NTXentLoss, SwaVLoss, TiCoLoss, VICRegLoss

    a, b, found = drawn(0, 8, 16).to(device).requires_grad_(), drawn(1, 8, 16).to(device), {}
    for kind in (NTXentLoss, BarlowTwinsLoss, VICRegLoss, DCLLoss, TiCoLoss):
        a.grad = None
        loss = kind().to(device)(a, b)
        loss.backward()
        assert a.grad is not None
        found |= {kind.__name__: loss.item(), f"gradient of {kind.__name__}": a.grad.abs().sum().item()}
    found["DINO"] = DINOLoss(output_dim=16).to(device)([b, b * 0.5], [a, a * 2, a * 3], epoch=1).item()
    return {**found, "SwaV": SwaVLoss().to(device)([a, a * 0.5], [a * 0.3]).item()}


def conditional(device: torch.device) -> Numbers:
    """Train a flow of each kind of zuko that is conditioned on a context."""
    import zuko

    x, context, found = drawn(0, 32, 3).to(device), drawn(1, 32, 2).to(device), {}
    sizes: dict[str, dict[str, Any]] = {
        "MAF": {"transforms": 2, "hidden_features": (16,)}, "NSF": {"transforms": 2, "bins": 4},
        "NICE": {"transforms": 2}, "GMM": {"components": 3}, "SOSPF": {"transforms": 1, "hidden_features": (16,)},
    }  # fmt: skip
    for name, options in sizes.items():
        torch.manual_seed(0)
        flow = getattr(zuko.flows, name)(3, 2, **options).to(device)
        found[name] = fit(flow, lambda flow=flow: -flow(context).log_prob(x).mean(), steps=2)
    return found


def tables(device: torch.device) -> Numbers:
    from pytorch_tabnet.tab_model import TabNetClassifier

    x, y = drawn(0, 64, 8).numpy(), (torch.arange(64) % 3).numpy()
    model = TabNetClassifier(n_d=4, n_a=4, n_steps=2, verbose=0, seed=0, device_name=str(device))
    model.fit(x, y, max_epochs=2, batch_size=32, virtual_batch_size=16, drop_last=False)
    return {"loss": model.history["loss"][-1], "spread": float(model.predict_proba(x).std())}


def labels(device: torch.device) -> Numbers:
    """Train a conditional random field, decode with it; and sparse maxima with their gradients."""
    from entmax import entmax15, entmax_bisect, sparsemax
    from torchcrf import CRF

    torch.manual_seed(0)
    field, scores = CRF(4, batch_first=True).to(device), drawn(0, 3, 6, 4).to(device)
    tags = torch.randint(0, 4, (3, 6), generator=torch.Generator().manual_seed(0)).to(device)
    mask = torch.tensor([[1] * 6, [1] * 4 + [0] * 2, [1] * 5 + [0]], device=device).bool()
    found = {"CRF": fit(field, lambda: -field(scores, tags, mask))}
    found["decoded"] = float(sum((n + 1) * tag for row in field.decode(scores, mask) for n, tag in enumerate(row)))
    x, weights = drawn(0, 5, 8).to(device).requires_grad_(), drawn(3, 5, 8).to(device)
    bisected = lambda x, dim: entmax_bisect(x, torch.tensor(1.3, device=device), dim=dim)  # noqa: E731
    for name, kind in {"entmax": entmax15, "sparsemax": sparsemax, "bisected": bisected}.items():
        x.grad = None
        loss = (kind(x, dim=-1) * weights).sum()
        loss.backward()
        assert x.grad is not None
        found |= {name: loss.item(), f"gradient of {name}": x.grad.abs().sum().item()}
    return found


def operators(device: torch.device) -> Numbers:
    from neuralop.models import FNO

    torch.manual_seed(0)
    model = FNO(n_modes=(4, 4), hidden_channels=8, in_channels=1, out_channels=1, n_layers=2).to(device)
    x = drawn(0, 2, 1, 16, 16).to(device)
    return {"loss": fit(model, lambda: model(x).square().mean(), steps=2)}


def curvature(device: torch.device) -> Numbers:
    """Approximate the posterior of a small network by curvatures of two structures; the full one needs the CPU."""
    from laplace import Laplace

    model, found = _net(device), {}
    for structure in ("kron", "diag"):
        posterior = Laplace(model, "classification", subset_of_weights="last_layer", hessian_structure=structure)
        posterior.fit(_loader())
        found[structure] = posterior.log_marginal_likelihood().item()
    return found


LIBRARIES = [
    Library("pytorch-ignite", "an engine with averages and five metrics", engines),
    Library("opacus", "gradients of samples, private training without noise", privacy, rtol=1e-3),
    Library("pytorch_optimizer", "15 optimizers, from AdaBelief to SOAP and Prodigy", many_optimizers, rtol=1e-3),
    Library("torch-optimizer", "10 optimizers, from A2Grad to Yogi", older_optimizers, rtol=1e-3),
    Library("lightly", "7 losses of self-supervised learning", selfsupervised, rtol=1e-3),
    Library("zuko", "5 conditional flows trained", conditional, rtol=1e-3),
    Library("pytorch-tabnet", "a classifier of tables trained", tables, rtol=1e-3),
    Library("pytorch-crf", "with entmax: a conditional random field, sparse maxima", labels, rtol=1e-3,
            needs=("entmax",)),
    Library("neuraloperator", "a Fourier neural operator trained", operators, rtol=1e-3),
    Library("laplace-torch", "posteriors from Kronecker and diagonal curvature", curvature, rtol=1e-3,
            needs=("curvlinops-for-pytorch",)),
]  # fmt: skip
