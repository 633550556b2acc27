"""What scripts of torch_tpu use: ``torch.tpu``, float16, mixed precision and its scaler."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import nn

import lazytpu


def test_the_names_of_the_device_module() -> None:
    tpu = torch.tpu  # type: ignore[attr-defined]
    tpu.set_device(0)
    tpu.synchronize()
    tpu.empty_cache()
    tpu.manual_seed(1)
    assert tpu.is_available()
    assert tpu.current_device() == 0
    assert tpu.max_memory_allocated() >= 0
    assert tpu.get_device_properties().total_memory > 0
    assert tpu.get_device_name().startswith("lazytpu on ")
    assert nn.Linear(2, 2).tpu().weight.is_tpu  # type: ignore[operator, attr-defined]


@pytest.mark.parametrize("fused", [True, False])
def test_a_scaler_reads_only_for_optimizers_that_cannot_skip_by_themselves(fused: bool, device: torch.device) -> None:
    model = nn.Linear(8, 8).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("tpu", init_scale=128.0)
    for step in range(5):
        if step == 2:
            lazytpu.metrics.reset()
        with torch.autocast("tpu", torch.float16):
            loss = model(torch.ones(2, 8, device=device)).sum()
        scaler.scale(loss.float()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        lazytpu.mark_step()
    forced = lazytpu.metrics.counter("cut") - lazytpu.metrics.counter("step")
    assert forced == (0 if fused else 3)
    assert ("3 x item inside torch at test_torch_tpu.py" in lazytpu.explain()) is not fused


def test_mixed_precision_learns_as_float32_and_float16_less(device: torch.device) -> None:
    """Steps of SGD smaller than half a unit of float16 are lost; and its weights take half of the bytes."""

    def train(how: str) -> tuple[float, int]:
        gc.collect()
        lazytpu.wait()
        before = torch.get_device_module(device).memory_allocated()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
        model, dtype = model.to(device), torch.float32
        if how == "fp16":
            model, dtype = model.half(), torch.float16
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=1e-3)
        scaler = torch.amp.GradScaler("tpu", enabled=how == "amp")
        y = torch.arange(640) % 10
        x = (torch.rand(640, 64) + nn.functional.one_hot(y, 64)).to(device, dtype)
        y = y.to(device)
        for _ in range(12):
            for at in range(0, 640, 64):
                with torch.autocast("tpu", torch.float16, enabled=how == "amp"):
                    loss = nn.functional.cross_entropy(model(x[at : at + 64]), y[at : at + 64])
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                lazytpu.mark_step()
        lazytpu.wait()
        with torch.no_grad():
            gained = 2.3026 - nn.functional.cross_entropy(model(x).float(), y).item()
        return gained, torch.get_device_module(device).memory_allocated() - before

    gained, held = {}, {}
    for how in ("fp32", "amp", "fp16"):
        gained[how], held[how] = train(how)
    assert gained["amp"] == pytest.approx(gained["fp32"], abs=2e-3)
    assert gained["fp16"] < gained["fp32"] - 2e-3
    assert held["fp16"] < 0.6 * held["fp32"]
