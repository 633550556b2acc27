"""Training on a mesh: the numbers of one device, states that lie as their parameters, no compile after step two."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import lazytpu
from lazytpu import spmd
from tests.support.eight_devices import eight_devices

Plan = Callable[[nn.Module, spmd.Mesh], tuple[object, ...]]
BOTH = ("data", "model")


def fully_sharded(model: nn.Module, mesh: spmd.Mesh) -> tuple[object, ...]:
    for p in model.parameters():
        spmd.mark_sharding(p, mesh, (BOTH,))  # 10 outputs over 8 devices among them
    return (BOTH,)


def train(plan: Plan | None, optimizer: type[torch.optim.Optimizer], steps: int = 4) -> tuple[list[float], nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 10)).to(lazytpu.device())
    mesh = spmd.Mesh((2, 4), BOTH)
    spec = plan(model, mesh) if plan else ()
    updater = optimizer(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        x, y = torch.randn(16, 16).to(lazytpu.device()), torch.randint(10, (16,)).to(lazytpu.device())
        if plan:
            spmd.mark_sharding(x, mesh, spec)
            spmd.mark_sharding(y, mesh, spec)
        loss = F.cross_entropy(model(x), y)
        updater.zero_grad()
        loss.backward()
        updater.step()
        lazytpu.mark_step()
        losses.append(loss.item())
        if len(losses) == 2:
            before = lazytpu.metrics.counter("compile")
    assert lazytpu.metrics.counter("compile") == before, lazytpu.explain()
    for p in model.parameters():
        states = [s for s in updater.state[p].values() if isinstance(s, torch.Tensor) and s.dim()]
        assert states and {spmd.sharding_of(s) for s in states} == {spmd.sharding_of(p)}
    return losses, model


def check(plan: Plan) -> nn.Module:
    lazytpu.config.compile_after = 1000  # op by op, with the CPU's own kernels
    want, alone = train(None, torch.optim.AdamW)
    lazytpu.config.compile_after = 1
    lazytpu.metrics.reset()
    got, model = train(plan, torch.optim.AdamW)
    assert got == pytest.approx(want, rel=1e-5)
    for a, b in zip(alone.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(b.cpu(), a.cpu(), rtol=1e-4, atol=1e-6)
    return model


@eight_devices
def test_split_parameters() -> None:
    model = check(fully_sharded)
    assert [len(s.data) for s in spmd.local_shards(model[2].weight)] == [2, 2, 2, 2, 2, 0, 0, 0]


@eight_devices
def test_gradients_that_add_up_keep_the_sharding_of_their_parameter() -> None:
    mesh = spmd.Mesh((8,), ("data",))
    w = nn.Parameter(torch.ones(8, 4).to(lazytpu.device()))
    spmd.mark_sharding(w, mesh, ("data",))
    for _ in range(4):
        (w * 2).sum().backward()
        lazytpu.mark_step()
        assert spmd.sharding_of(w.grad) == spmd.sharding_of(w)
    assert torch.equal(w.grad.cpu(), torch.full((8, 4), 8.0))
    assert lazytpu.metrics.counter("compile") == 2


@eight_devices
def test_two_batches_a_step_in_half_precision_scaled_clipped_and_recomputed() -> None:
    want, got = (_losses_of_scaled_steps(split) for split in (False, True))
    assert got == pytest.approx(want, rel=1e-5)


def _losses_of_scaled_steps(split: bool) -> list[float]:
    torch.manual_seed(0)
    device, mesh = lazytpu.device(), spmd.Mesh((8,), ("data",))
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.BatchNorm1d(32), nn.Linear(32, 10)).to(device)
    if split:
        spmd.fully_shard(model, mesh)
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=0.01), torch.amp.GradScaler(device.type)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(2):
            x, y = torch.randn(16, 16).to(device), torch.randint(10, (16,)).to(device)
            if split:
                spmd.mark_sharding(x, mesh, ("data",))
                spmd.mark_sharding(y, mesh, ("data",))
            with torch.autocast(device.type, torch.bfloat16):
                loss = F.cross_entropy(checkpoint(model, x, use_reentrant=False).float(), y) / 2
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        lazytpu.mark_step()
        losses.append(loss.item())
    return [*losses, float(model[2].running_mean.sum())]


@eight_devices
def test_dropout_drops_the_same_elements_whatever_the_mesh() -> None:
    found = []
    for shape, spec in (((8,), ()), ((8,), ("a",)), ((2, 4), ("b", "a"))):
        mesh = spmd.Mesh(shape, ("a", "b")[: len(shape)])
        lazytpu.mark_step()
        torch.manual_seed(3)
        x = spmd.mark_sharding(torch.ones(16, 32).to(lazytpu.device()), mesh, spec)
        found.append(F.dropout(x, 0.5).cpu())
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    assert 0 < found[0].count_nonzero() < found[0].numel()


@eight_devices
def test_sums_of_rows_and_columns_gather_nothing() -> None:
    mesh = spmd.Mesh((2, 4), BOTH)
    weight, bias = (torch.randn(64).to(lazytpu.device()).requires_grad_() for _ in range(2))
    for spec in ((BOTH,), (None, BOTH), (None, None, BOTH), ("data", "model")):
        x, grad = (spmd.mark_sharding(torch.randn(8, 16, 64).to(lazytpu.device()), mesh, spec) for _ in range(2))
        y = F.layer_norm(x, (64,), weight, bias)
        text = lazytpu.hlo_text(y, *torch.autograd.grad(y, (weight, bias), grad), optimized=True)
        assert "all-gather" not in text and "dot(" in text, spec
