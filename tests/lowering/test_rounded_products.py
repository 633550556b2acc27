"""A product is rounded before anything is subtracted from it, also where XLA computes it anew in each loop."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import lazytpu

X = torch.arange(20.0).reshape(4, 5).sin() * 3
LARGE = -1.7197e14
CASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "less its maximum": lambda x: ((y := x * 0.1) - y.amax(-1, keepdim=True)).sign(),
    "the root of the distance to the maximum": lambda x: ((y := x * 0.1).max() - y).sqrt().isfinite(),
    "less an element": lambda x: ((y := x * 0.1) - y.flip(0)[:, 2:3]).sign(),
    "equal products": lambda x: x * 0.1 - (x * 0.1).contiguous(),
    "less the maximum of an equal product": lambda x: (x * 0.1 - (x * 0.1).amax(-1, keepdim=True) == 0).sum(-1),
    "the root of a discriminant": lambda x: (x * x - 4 * (x / 2) * (x / 2)).sqrt(),
    "softmax": lambda x: (x * LARGE).softmax(-1),
    "log_softmax": lambda x: (x * LARGE).log_softmax(-1),
    "softmin": lambda x: F.softmin(x * -LARGE, -1),
    "logsumexp": lambda x: (x * LARGE).logsumexp(-1),
    "cross_entropy": lambda x: F.cross_entropy(x * -LARGE, torch.tensor([0, 1, 2, 3], device=x.device)),
    "attention": lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None], scale=LARGE),
}


def test_products_are_rounded(device: torch.device, optimized: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazytpu.config, "compile_after", 1)
    x = X.to(device)
    found = {name: case(x) for name, case in CASES.items()}
    lazytpu.mark_step()
    for name, case in CASES.items():
        torch.testing.assert_close(
            found[name].cpu(), case(X), rtol=1e-6, atol=0, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_only_such_products_are_kept(device: torch.device) -> None:
    x = X.to(device)
    y = x * 0.1
    z = y - y.mean() + (y + 1).exp().amax()
    assert "inlineable" not in lazytpu.stablehlo_text(z)
    assert "inlineable" in lazytpu.stablehlo_text(y - y.amax())
