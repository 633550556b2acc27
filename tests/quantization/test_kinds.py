"""Each way to quantize, for each kind of module."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence

import lazytpu
from lazytpu import quantization

KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    "linear": (lambda: nn.Linear(64, 24, bias=False), lambda: torch.randn(5, 64)),
    "conv": (lambda: nn.Conv2d(32, 8, 3, padding=1, groups=2, bias=False), lambda: torch.randn(2, 32, 6, 6)),
    "embedding": (lambda: nn.Embedding(20, 64, padding_idx=0), lambda: torch.randint(0, 20, (3, 7))),
    "lstm": (lambda: nn.LSTM(32, 16, 2, bidirectional=True), lambda: torch.randn(5, 2, 32)),
}
WAYS: dict[str, tuple[Callable[[nn.Module, torch.Tensor], nn.Module], float]] = {
    "dynamic": (lambda m, x: quantization.quantize_dynamic(m), 0.02),
    "dynamic, per tensor": (lambda m, x: quantization.quantize_dynamic(m, per_channel=False), 0.03),
    "dynamic, 16 bits": (lambda m, x: quantization.quantize_dynamic(m, bits=16), 1e-3),
    "static": (lambda m, x: quantization.quantize_static(m, quantization.calibrate(m, [x])), 0.03),
    "static, per tensor": (
        lambda m, x: quantization.quantize_static(m, quantization.calibrate(m, [x]), per_channel=False),
        0.03,
    ),
    "weights": (lambda m, x: quantization.quantize_weights(m), 0.02),
    "weights, 4 bits": (lambda m, x: quantization.quantize_weights(m, bits=4), 0.2),
    "training": (lambda m, x: trained(m, x, 8), 0.03),
    "training, converted": (lambda m, x: quantization.convert(trained(m, x, 8)), 0.03),
    "training, 31 bits": (lambda m, x: trained(m, x, 31), 1e-4),
}


def trained(module: nn.Module, x: torch.Tensor, bits: int) -> nn.Module:
    """A module that has seen a batch in training."""
    prepared = quantization.prepare_training(module, bits).train()
    with torch.enable_grad():
        result(prepared(x)).sum().backward()
    assert all(p.grad is not None for p in prepared.parameters())
    return prepared.eval()


def result(out: Any) -> Any:
    return out[0] if isinstance(out, tuple) else out


def size_of(module: nn.Module) -> int:
    return sum(t.numel() * t.element_size() for t in module.state_dict().values())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_close_to_floats(kind: str, way: str) -> None:
    torch.manual_seed(0)
    (make, batch), (quantize, tolerance) = KINDS[kind], WAYS[way]
    module, x = make().eval(), batch()
    quantized = quantize(module, x)
    with torch.no_grad():
        got, want = result(quantized(x)), result(module(x))
        assert (got - want).norm() < tolerance * want.norm()
        assert not torch.equal(got, want)
        saved = io.BytesIO()
        torch.save(quantized, saved)
        saved.seek(0)
        again = quantize(make().eval(), x)
        again.load_state_dict(quantized.state_dict())
        for other in (copy.deepcopy(quantized), torch.load(saved, weights_only=False), again):
            assert torch.equal(result(other(x)), got)
    if "training" not in way or "converted" in way:
        assert size_of(quantized) < size_of(module) * (0.62 if "16" in way else 0.3 if "4 bits" in way else 0.38)


@pytest.mark.parametrize("kind", ["conv", "lstm"])
def test_fixed_scales_and_training_are_integers_on_the_device(kind: str, device: torch.device) -> None:
    torch.manual_seed(0)
    make, batch = KINDS[kind]
    module, x = make().eval(), batch()
    for way in ("static", "training, converted"):
        quantized = WAYS[way][0](module, x)
        with torch.no_grad():
            want = result(quantized(x))
            got = result(quantized.to(device)(x.to(device)))
            text = lazytpu.hlo_text(got)
        types = dict(re.findall(r"(\S+) = (\w+)\[", text))
        products = re.findall(r"= (\w+)\[\S+ (?:dot|convolution)\(([^,)]+), ([^,)]+)\)", text)
        assert products
        assert {(out, types[a], types[b]) for out, a, b in products} == {("s32", "s8", "s8")}
        torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["embedding", "lstm"])
def test_training_follows_the_cpu(kind: str, device: torch.device) -> None:
    make, batch = KINDS[kind]
    grads = []
    for place in ("cpu", device):
        torch.manual_seed(0)
        module, x = make(), batch()
        prepared = quantization.prepare_training(module).to(place)
        result(prepared(x.to(place))).square().sum().backward()
        grads.append([p.grad.cpu() for p in prepared.parameters() if p.grad is not None])
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("way", ["dynamic, 16 bits", "weights, 4 bits", "training, 31 bits"])
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_before_and_after(kind: str, way: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    (make, batch), (quantize, tolerance) = KINDS[kind], WAYS[way]
    module, x = make().eval(), batch()
    module.load_state_dict({k: v * 1e-2 for k, v in module.state_dict().items()})  # scales below float16's numbers
    x = x * 1e-2 if x.is_floating_point() else x
    half = x.to(dtype) if x.is_floating_point() else x
    want = result(module(x))
    for quantized in (quantize(copy.deepcopy(module).to(dtype), half), quantize(module, x).to(dtype)):
        got = result(quantized(half))
        assert got.dtype == dtype
        assert (got.float() - want).norm() < (tolerance + 0.02) * want.norm()


def test_a_group_that_fits_is_found() -> None:
    groups = {size: quantization.WeightOnlyLinear(nn.Linear(size, 2), 4).group for size in (64, 100, 72, 33, 8)}
    assert groups == {64: 32, 100: 20, 72: 24, 33: 33, 8: 8}
    assert quantization.WeightOnlyLinear(nn.Linear(33, 2), 4).bits == 8
    assert quantization.WeightOnlyLinear(nn.Linear(24, 2), 4, group=8).scale.shape == (2, 3)


def test_packed_sequences_are_refused() -> None:
    quantized = quantization.quantize_dynamic(nn.LSTM(4, 4))
    with pytest.raises(TypeError, match="pad the sequences"):
        quantized(pack_sequence([torch.ones(2, 4)]))
