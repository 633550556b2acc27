"""A product is rounded before anything is added to it, also where XLA computes it anew in each loop."""

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
    "the sum of opposite products": lambda x: (x + 4) * 1e20 * (x * x) + (x + 4) * -1e20 * (x * x),
    "the difference of equal squares": lambda x: x * x - x.clone() * x.clone(),
    "parallel vectors": lambda x: x[:, 0] * (3 * x)[:, 1] - x[:, 1] * (3 * x)[:, 0],
    "a product less its mean": lambda x: ((y := (x * 0 + 0.1) * 0.3) - y.sum(1, keepdim=True) / 5 == 0).sum(),
    "an outer product": lambda x: ((y := x[:, :1] @ x[:1]) - y.max()).amax().sign(),
    "opposite terms of a sum": lambda x: torch.stack([x * 0.1, x * -0.1]).sum(0),
    "what is left of a quotient": lambda x: (x.new_full((3,), 10.0) * 0.1).remainder(1.0),
    "close to a singularity": lambda x: (x.new_full((3,), -10.0) * 0.1).log1p(),
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


def test_products_of_two_programs(device: torch.device, optimized: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazytpu.config, "compile_after", 1)
    x = X.to(device)
    y = x * 0.1
    lazytpu.mark_step()
    assert (x * 0.1 - y).count_nonzero().item() == 0


def test_only_such_products_are_rounded(device: torch.device) -> None:
    x = X.to(device)
    y = x * 0.1
    assert "compare" not in lazytpu.stablehlo_text(y.exp().amax(0) @ (y * y).T)
    assert lazytpu.stablehlo_text(y.T - y.amax()).count("compare") == 1
    assert "compare" not in lazytpu.stablehlo_text((x.bfloat16() * 0.1).T + 1)
