"""Attention some rows at a time equals attention at once, and that of the CPU; lowerings that are asked for by name."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest
import torch
import torch.nn.functional as F

import lazytpu
from lazytpu.config import config
from lazytpu.diagnosis import events
from lazytpu.ir.tree import trace
from lazytpu.lowering.support import attention_blocks
from lazytpu.tracing import step

BIASES = {
    "none": lambda b, h, t, s: None,
    "full": lambda b, h, t, s: torch.randn(b, h, t, s),
    "for all rows": lambda b, h, t, s: torch.randn(1, 1, 1, s),
    "for all keys": lambda b, h, t, s: torch.randn(t, 1),
    "bool": lambda b, h, t, s: torch.rand(t, s) > 0.2,
    "bool for all rows": lambda b, h, t, s: torch.rand(b, 1, 1, s) > 0.2,
}


@pytest.fixture(autouse=True)
def small_turns(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """64 rows a turn, whatever the sizes."""
    step.forget()
    monkeypatch.setattr(attention_blocks, "SCORE_BYTES", 1 << 10)
    monkeypatch.setattr(config, "lowerings", "blocked_attention")
    yield
    step.forget()


def results(device: object, arrays: list[torch.Tensor], bias: torch.Tensor | None, g: torch.Tensor, **how: object):
    inputs = [x.detach().to(device).requires_grad_() for x in arrays]
    mask = None if bias is None else bias.to(device)
    y = F.scaled_dot_product_attention(*inputs, attn_mask=mask, **how)
    return [x.cpu() for x in (y.detach(), *torch.autograd.grad(y, inputs, g.to(device)))]


def compare(
    b: int, h: int, kv: int, t: int, s: int, bias: torch.Tensor | None, dtype: torch.dtype, causal: bool
) -> None:
    made = [torch.randn(b, n, rows, 8, dtype=dtype) for n, rows in ((h, t), (kv, s), (kv, s))]
    g = torch.randn(b, h, t, 8, dtype=dtype)
    how = {"is_causal": causal, "enable_gqa": h != kv}
    got = results(lazytpu.device(), made, bias, g, **how)
    tolerance = 2e-2 if dtype is torch.bfloat16 else 2e-6
    for x, y in zip(got, results("cpu", made, bias, g, **how), strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("queries, keys", [(200, 200), (128, 64), (64, 200), (193, 130)])
@pytest.mark.parametrize("heads, of_keys", [(2, 2), (4, 2)])
def test_causal(queries: int, keys: int, heads: int, of_keys: int) -> None:
    compare(2, heads, of_keys, queries, keys, None, torch.float32, True)


@pytest.mark.parametrize("of_keys", [2, 1])
@pytest.mark.parametrize("bias", BIASES)
def test_biases(bias: str, of_keys: int) -> None:
    compare(1, 2, of_keys, 150, 70, BIASES[bias](1, 2, 150, 70), torch.float32, False)


def test_a_mask_and_shared_heads_are_one_op() -> None:
    def recorded(mask: torch.Tensor | None, of_keys: int) -> int:
        device = lazytpu.device()
        q, k = (torch.ones(1, n, 5, 8, device=device) for n in (4, of_keys))
        mask = None if mask is None else mask.to(device)
        lazytpu.mark_step()
        y = F.scaled_dot_product_attention(q, k, k, attn_mask=mask, enable_gqa=of_keys != 4)  # noqa: F841
        return trace.cursor.depth

    assert recorded(None, 4) == recorded(torch.ones(1, 1, 5, 5, dtype=torch.bool), 2) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    compare(1, 2, 2, 130, 130, None, dtype, True)


def test_a_bias_that_learns() -> None:
    q, k, v = (torch.randn(1, 2, 130, 8) for _ in range(3))
    bias, wanted = torch.randn(1, 2, 130, 130), None
    for device in ("cpu", lazytpu.device()):
        learned = bias.to(device).requires_grad_()
        y = F.scaled_dot_product_attention(q.to(device), k.to(device), v.to(device), attn_mask=learned)
        (got,) = torch.autograd.grad(y.square().sum(), learned)
        wanted = got if wanted is None else wanted
    torch.testing.assert_close(got.cpu(), wanted)


def test_the_gradient_drops_what_the_result_dropped() -> None:
    torch.manual_seed(3)
    q, k, v, g = (torch.randn(1, 2, 200, 8).to(lazytpu.device()) for _ in range(4))
    v.requires_grad_()
    y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.4, is_causal=True)
    (of_v,) = torch.autograd.grad(y, v, g)
    # The result is linear in v, so both products are the same number only where both have the same mask.
    torch.testing.assert_close((y * g).sum().item(), (v * of_v).sum().item(), rtol=1e-4, atol=1e-4)
    plain = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert not torch.allclose(y.cpu(), plain.cpu())
    ones = torch.ones_like(v)
    kept = F.scaled_dot_product_attention(q * 0, k, ones, dropout_p=0.4)[..., 0].cpu()
    assert abs(kept.mean().item() - 1) < 0.02 and kept.unique().numel() > 20  # no two turns drop the same


def test_a_bias_that_learns_with_dropout() -> None:
    q, k, v, g = (torch.randn(1, 2, 200, 8).to(lazytpu.device()) for _ in range(4))
    bias = torch.randn(1, 2, 200, 200).to(lazytpu.device()).requires_grad_()
    v.requires_grad_()
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=0.4)
    of_v, _ = torch.autograd.grad(y, (v, bias), g)
    torch.testing.assert_close((y * g).sum().item(), (v * of_v).sum().item(), rtol=1e-4, atol=1e-4)


def test_scores_of_all_rows_are_never_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "lowerings", "auto")
    monkeypatch.setattr(attention_blocks, "SCORE_BYTES", 4 << 20)
    made = [torch.randn(1, 4, 2048, 8) for _ in range(3)]
    results(lazytpu.device(), made, None, torch.randn(1, 4, 2048, 8), is_causal=True)
    compiled = [e.executable.compiled for e in events.compilations if e.executable is not None]
    planned = [c.memory_analysis().temp_size_in_bytes for c in compiled]
    assert 0 < max(planned) < 4 * 2048 * 2048 * 4 / 2


def test_small_ones_are_computed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    q = jax.ShapeDtypeStruct((1, 4, 1024, 8), jax.numpy.float32)
    fewer = jax.ShapeDtypeStruct((1, 4, 1000, 8), jax.numpy.float32)
    assert attention_blocks.rows_at_a_time(q, q) == 64
    monkeypatch.setattr(config, "lowerings", "auto")
    assert attention_blocks.rows_at_a_time(q, q) == 64  # 16 MiB of scores
    assert attention_blocks.rows_at_a_time(fewer, q) == 0
    monkeypatch.setattr(config, "lowerings", "whole_attention")
    assert attention_blocks.rows_at_a_time(q, q) == 0


def test_a_convolution_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = (torch.randn(2, 3, 8, 8).to(lazytpu.device()) for _ in range(2))
    texts = {}
    for how in ("auto", "xla_convolution", "own_convolution,whole_attention"):
        monkeypatch.setattr(config, "lowerings", how)
        texts[how] = "stablehlo.convolution" in lazytpu.stablehlo_text(F.conv2d(x, w))
    assert texts == {"auto": False, "xla_convolution": True, "own_convolution,whole_attention": False}
    with pytest.raises(ValueError, match="lowerings must be one of"):
        config.lowerings = "fast"


def test_another_lowering_is_another_program(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 2, 130, 8).to(lazytpu.device())
    before = lazytpu.metrics.counter("compile")
    for how in ("blocked_attention", "whole_attention", "blocked_attention"):
        monkeypatch.setattr(config, "lowerings", how)
        y = F.scaled_dot_product_attention(q, q, q)
        lazytpu.mark_step()
        del y
    assert lazytpu.metrics.counter("compile") == before + 2
    assert "lowerings" in lazytpu.explain()
