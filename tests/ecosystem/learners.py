"""Libraries that hold the loop themselves, and networks of another kind: spikes, splines, qubits."""

from __future__ import annotations

import logging
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.ecosystem.case import Library, Numbers
from tests.ecosystem.steps import drawn, fit


def learner(device: torch.device) -> Numbers:
    """Fit with one cycle and with a flat rate, save, load, validate; then with Ranger and LAMB."""
    from fastai.callback.schedule import Learner as Scheduled
    from fastai.callback.training import GradientClip
    from fastai.data.core import DataLoaders
    from fastai.data.load import DataLoader
    from fastai.learner import Learner
    from fastai.losses import CrossEntropyLossFlat
    from fastai.metrics import accuracy
    from fastai.optimizer import Lamb, ranger

    rows = list(zip(drawn(0, 32, 8), torch.arange(32) % 3, strict=True))

    def made(folder: str, **options: Any) -> Scheduled:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).to(device)
        batches = (DataLoader(rows, bs=8, num_workers=0), DataLoader(rows, bs=8, num_workers=0))
        data = DataLoaders(*batches, device=device)
        return Learner(data, net, loss_func=CrossEntropyLossFlat(), path=folder, **options)

    with TemporaryDirectory() as folder:
        first = made(folder, metrics=accuracy, cbs=[GradientClip(1.0)])
        with first.no_bar(), first.no_logging():
            first.fit_one_cycle(3, 1e-2)
            first.fit_flat_cos(2, 1e-2)
            first.save("kept")
            first.load("kept")
            loss, right = first.validate()
        found = {"loss": float(loss), "accuracy": float(right)}
        for name, optimizer in {"Ranger": ranger, "LAMB": Lamb}.items():
            other = made(folder, opt_func=optimizer)
            with other.no_bar(), other.no_logging():
                other.fit(2, 1e-2)
                found[name] = float(other.validate()[0])
    return found


def forecasts(device: torch.device) -> Numbers:
    """Fit NHITS and an MLP to a sine by Lightning, and predict."""
    import numpy
    import pandas
    from neuralforecast import NeuralForecast
    from neuralforecast.models import MLP, NHITS

    for name in ("lightning", "pytorch_lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    table = pandas.DataFrame({
        "unique_id": "a", "ds": pandas.date_range("2020", periods=60), "y": numpy.sin(numpy.arange(60) / 5).astype("f4")
    })  # fmt: skip
    options: dict[str, Any] = {
        "h": 4, "input_size": 8, "max_steps": 6, "accelerator": "cpu" if device.type == "cpu" else "auto", "devices": 1,
        "enable_progress_bar": False, "logger": False, "random_seed": 1, "windows_batch_size": 8, "batch_size": 1,
    }  # fmt: skip
    found = {}
    for kind in (NHITS, MLP):
        forecast = NeuralForecast([kind(**options)], freq="D")
        forecast.fit(table)
        found[kind.__name__] = float(forecast.predict()[kind.__name__].abs().max() < 3)
    return found


def spikes(device: torch.device) -> Numbers:
    """Train a network of spiking neurons through surrogate gradients."""
    import snntorch
    from snntorch import functional, surrogate

    torch.manual_seed(0)
    first, second = nn.Linear(8, 16).to(device), nn.Linear(16, 3).to(device)
    leaky = snntorch.Leaky(beta=0.9, spike_grad=surrogate.fast_sigmoid()).to(device)
    last = snntorch.Leaky(beta=0.9, spike_grad=surrogate.fast_sigmoid()).to(device)
    x, y = 3 * drawn(0, 4, 8).to(device), torch.tensor([0, 1, 2, 0]).to(device)
    counted = functional.ce_rate_loss()

    def loss() -> torch.Tensor:
        hidden, out, fired = leaky.reset_mem(), last.reset_mem(), []
        for _ in range(6):
            spike, hidden = leaky(first(x), hidden)
            spike, out = last(second(spike), out)
            fired.append(spike)
        return counted(torch.stack(fired), y) + F.cross_entropy(out, y)

    return {"loss": fit(nn.ModuleList([first, second]), loss, 4)}


def splines(device: torch.device) -> Numbers:
    """Fit a Kolmogorov-Arnold network with SGD and with L-BFGS."""
    from kan import KAN

    torch.manual_seed(0)
    net = KAN(width=[2, 3, 1], grid=3, k=3, seed=0, device=device, auto_save=False)
    x = drawn(0, 20, 2).to(device)
    y = x[:, :1] * x[:, 1:]
    found = {"SGD": fit(net, lambda: F.mse_loss(net(x), y), 2)}
    data = {"train_input": x, "train_label": y, "test_input": x, "test_label": y}
    return found | {"L-BFGS": float(net.fit(data, opt="LBFGS", steps=2, update_grid=False, log=10)["train_loss"][-1])}


LIBRARIES = [
    Library("fastai", "a Learner: one cycle, a flat rate, clipping, saving, Ranger and LAMB", learner, rtol=1e-3),
    Library("neuralforecast", "NHITS and an MLP fitted by Lightning, predictions", forecasts),
    Library("snntorch", "a spiking network trained", spikes, rtol=1e-3),
    Library("pykan", "a Kolmogorov-Arnold network fitted with SGD and L-BFGS", splines, rtol=1e-2),
]  # fmt: skip
