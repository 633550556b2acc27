"""Clipping, parametrizations, averaged models and pruning, on the device as on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.optim.optimizer import _default_to_fused_or_foreach

import lazytpu
from tests.support.both_devices import DEVICES, check, given, mlp


@pytest.mark.parametrize(("norm", "foreach"), [(2.0, None), (2.0, False), (1.0, True), (float("inf"), None)])
def test_clip_grad(norm, foreach):
    def program(device):
        model = mlp(device)
        model(given(device, (2, 4))).square().sum().backward()
        total = nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type=norm, foreach=foreach)
        grads = [p.grad.clone() for p in model.parameters()]
        nn.utils.clip_grad_value_(model.parameters(), 0.01, foreach=foreach)
        again = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        return total, grads, again, [p.grad for p in model.parameters()]

    check(program)


def test_clip_grad_norm_of_nonfinite_gradients():
    for device in DEVICES:
        p = nn.Parameter(torch.ones(2, device=device))
        p.grad = torch.tensor([1.0, float("inf")], device=device)
        with pytest.raises(RuntimeError, match="total norm of order 2.0 for gradients from `parameters` is non-finite"):
            nn.utils.clip_grad_norm_([p], 1.0, error_if_nonfinite=True)
        assert nn.utils.clip_grad_norm_([p], 1.0).item() == float("inf")


def test_clip_grad_norm_cuts_nothing():
    model = mlp("tpu")
    model(given("tpu", (2, 4))).sum().backward()
    before = lazytpu.metrics.counter("cut")
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert lazytpu.metrics.counter("cut") == before


def test_parameters_to_vector():
    def program(device):
        model = mlp(device)
        vector = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters(vector * 2, model.parameters())
        return vector, list(model.parameters())

    check(program)


PARAMETRIZATIONS = {
    "weight_norm": nn.utils.parametrizations.weight_norm,
    "spectral_norm": nn.utils.parametrizations.spectral_norm,
    "orthogonal": nn.utils.parametrizations.orthogonal,
    "orthogonal_cayley": lambda m: nn.utils.parametrizations.orthogonal(m, orthogonal_map="cayley"),
    "symmetric": lambda m: nn.utils.parametrize.register_parametrization(m, "weight", Symmetric()),
}


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).mT


@pytest.mark.parametrize("name", PARAMETRIZATIONS)
def test_parametrize(name):
    def program(device):
        torch.manual_seed(0)
        model = PARAMETRIZATIONS[name](nn.Linear(4, 4)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(given(device, (2, 4))).square().mean().backward()
            optimizer.step()
        weight = model.weight
        with nn.utils.parametrize.cached():
            assert model.weight is model.weight
        nn.utils.parametrize.remove_parametrizations(model, "weight")
        return weight, model.weight

    check(program, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "average",
    [
        lambda model: torch.optim.swa_utils.AveragedModel(model),
        lambda model: torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
        ),
        lambda model: torch.optim.swa_utils.AveragedModel(model, avg_fn=torch.optim.swa_utils.get_ema_avg_fn(0.9)),
    ],
)
def test_averaged_models(average):
    def program(device):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(device)
        averaged, optimizer = average(model), torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05)
        batches = [given(device, (6, 4), requires_grad=False) * i for i in (1.0, 2.0, 3.0)]
        for x in batches:
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
            averaged.update_parameters(model)
            schedule.step()
        torch.optim.swa_utils.update_bn(batches, averaged)
        return averaged.state_dict()["module.0.weight"], list(averaged.module.buffers()), averaged(batches[0])

    check(program, rtol=1e-4, atol=1e-5)


def test_optimizers_take_the_foreach_path():
    model = mlp("tpu")
    _, foreach = _default_to_fused_or_foreach(list(model.parameters()), differentiable=False)
    assert foreach


def test_pruning_and_skipping_initialisation():
    def program(device):
        model = mlp(device)
        prune.l1_unstructured(model[0], "weight", amount=0.5)
        model(given(device, (2, 4))).sum().backward()
        return model[0].weight, model[0].weight_orig.grad

    check(program)
    assert nn.utils.skip_init(nn.Linear, 2, 2, device="tpu").weight.is_tpu


def test_deepcopy_in_the_middle_of_training_trains_alike():
    def program(device):
        model = mlp(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        x = given(device, (2, 4), requires_grad=False)
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
        other = copy.deepcopy(model)
        again = torch.optim.Adam(other.parameters(), lr=0.1)
        again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for m, o in ((model, optimizer), (other, again)):
            o.zero_grad()
            m(x).square().sum().backward()
            o.step()
        assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
        return list(other.parameters())

    check(program, rtol=1e-4, atol=1e-5)
