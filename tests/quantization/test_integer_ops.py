"""The ops of graphs that ``torch.ao`` quantizes: bit for bit the CPU's, without a cut or a fallback."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.ao.quantization.fx._decomposed
from torch.utils._pytree import tree_leaves, tree_map

from lazytpu.observe import metrics

quantized = torch.ops.quantized_decomposed
generator = torch.Generator().manual_seed(0)
X = torch.randn(4, 16, generator=generator) * 3
X[0, 0], X[1] = 100, 0  # past the range; a row of zeros
SCALES, ZEROS = torch.rand(16, generator=generator) * 0.1 + 0.01, torch.arange(16) - 8
GRID = quantized.quantize_per_tensor(X, 0.037, 3, 0, 255, torch.uint8)
HALF = (torch.bfloat16, torch.float16)
SCALE, ZERO = torch.tensor(0.037), torch.tensor(3)
I8, U8 = torch.int8, torch.uint8
LIMITS = torch.tensor(-128), torch.tensor(127)

CALLS: dict[str, list[tuple[Any, ...]]] = {
    "quantize_per_tensor.default": [(X, 0.037, 3, -128, 127, I8), (X, 0.5, 128, 0, 255, U8)],
    "quantize_per_tensor.tensor": [(X, SCALE, ZERO, -128, 127, I8), (X, SCALE.double()[None], ZERO[None], 0, 255, U8)],
    "quantize_per_tensor.tensor2": [(X, SCALE, ZERO, *LIMITS, I8)],
    "dequantize_per_tensor.default": [(GRID, 0.037, 3, 0, 255, U8)],
    "dequantize_per_tensor.tensor": [(GRID, SCALE, ZERO, 0, 255, U8)],
    "dequantize_per_tensor.tensor2": [(GRID, SCALE.double(), ZERO, *LIMITS, U8)],
    "choose_qparams.tensor": [(x, -128, 127, 1e-5, I8) for x in (X, X.abs(), -X.abs(), X * 0)],
    "choose_qparams_symmetric.tensor": [(X, -128, 127, 1e-5, I8), (X, 0, 255, 1e-5, U8)],
    "choose_qparams_per_token.default": [(X, I8)],
    "choose_qparams_per_token_asymmetric.default": [(X, I8)],
    "quantize_per_channel.default": [(X, SCALES, ZEROS, 1, -128, 127, I8), (X, SCALES[:4], ZEROS[:4], 0, 0, 255, U8)],
    "dequantize_per_channel.default": [(GRID, SCALES, ZEROS, 1, 0, 255, U8), (GRID, SCALES, None, 1, 0, 255, U8)],
    "quantize_per_token.default": [(X, SCALES[:4, None], ZEROS[:4, None], -128, 127, I8)],
    "dequantize_per_token.default": [(GRID, SCALES[:4, None], ZEROS[:4, None], 0, 255, U8, torch.float32)],
    "quantize_per_channel_group.default": [(X, SCALES[:8].view(4, 2), ZEROS[:8].view(4, 2), -8, 7, I8, 8)],
    "dequantize_per_channel_group.default": [
        (GRID, SCALES[:8].view(4, 2), ZEROS[:8].view(4, 2), 0, 255, U8, 8, torch.float32)
    ],
    "convert_element_type.no_fuse": [(X, torch.float64), (X, torch.int32)],
    "fake_quant_per_channel.default": [(X, SCALES, ZEROS, 1, -128, 127)],
}
WIDE_ONLY = {"fake_quant_per_channel.default"}


def test_every_op_is_here() -> None:
    prefix = "quantized_decomposed::"
    names = [n.removeprefix(prefix) for n in torch._C._dispatch_get_all_op_names() if n.startswith(prefix)]
    public = {n if "." in n else f"{n}.default" for n in names if not n.startswith("_")}
    assert public == set(CALLS)


@pytest.mark.parametrize("dtype", [torch.float32, *HALF])
@pytest.mark.parametrize("name", CALLS)
def test_equals_the_cpu(device: torch.device, name: str, dtype: torch.dtype) -> None:
    packet, overload = name.split(".")
    op = getattr(getattr(quantized, packet), overload)
    for call in CALLS[name]:
        if call[0].dtype.is_floating_point:
            call = (call[0].to(dtype), *call[1:])
        if dtype in HALF and (call[0].dtype != dtype or name in WIDE_ONLY):
            continue
        want = op(*call)
        ours = tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, call)
        metrics.reset()
        got = op(*ours)
        assert not metrics.counter("cut")
        assert not metrics.fallbacks()
        for g, w in zip(tree_leaves(got), tree_leaves(want), strict=True):
            assert (g.dtype, g.shape) == (w.dtype, w.shape)
            if name == "choose_qparams_per_token_asymmetric.default" and w.is_floating_point():
                torch.testing.assert_close(g.cpu(), w, rtol=2e-7, atol=0)  # a fused division, one unit off
            else:
                assert torch.equal(g.cpu(), w)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("overload", ["default", "tensor"])
def test_dequantize_to_half(device: torch.device, overload: str, dtype: torch.dtype) -> None:
    scale, zero = (0.037, 3) if overload == "default" else (SCALE, ZERO)
    op = getattr(quantized.dequantize_per_tensor, overload)
    want = op(GRID, scale, zero, 0, 255, U8, out_dtype=dtype)
    ours = [x.to(device) if isinstance(x, torch.Tensor) else x for x in (scale, zero)]
    assert torch.equal(op(GRID.to(device), *ours, 0, 255, U8, out_dtype=dtype).cpu(), want)


def test_gradient_of_fake_quant(device: torch.device) -> None:
    ours, theirs = X.to(device).requires_grad_(), X.clone().requires_grad_()
    for x in (ours, theirs):
        quantized.fake_quant_per_channel(x, SCALES.to(x.device), ZEROS.to(x.device), 1, -20, 20).sum().backward()
    assert torch.equal(ours.grad.cpu(), theirs.grad)
    assert not theirs.grad.bool().all()


def test_a_scale_that_changes_compiles_twice_at_most(device: torch.device) -> None:
    x = X.to(device)
    metrics.reset()
    for scale in (0.01, 0.02, 0.03, 0.04, 0.05):
        got = quantized.quantize_per_tensor(x, scale, 3, -128, 127, I8)
        assert torch.equal(got.cpu(), quantized.quantize_per_tensor(X, scale, 3, -128, 127, I8))
    assert metrics.counter("compile") <= 2


def test_wrong_dtype(device: torch.device) -> None:
    with pytest.raises(AssertionError, match="Expecting input to have dtype"):
        quantized.quantize_per_tensor(X.double().to(device), 0.1, 0, -128, 127, I8)
