"""Types that torch's own meta kernels have otherwise than the CPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F


@pytest.mark.parametrize("dtypes", [(torch.float16, torch.float32), (torch.float32, torch.float64)], ids=str)
def test_normal_numbers_have_the_dtype_of_the_means(device: torch.device, dtypes: tuple[torch.dtype, ...]) -> None:
    mean, std = torch.zeros(3, 1, dtype=dtypes[0]), torch.ones(2, dtype=dtypes[1])
    want, got = torch.normal(mean, std), torch.normal(mean.to(device), std.to(device))
    assert (got.dtype, got.shape, got.stride()) == (want.dtype, want.shape, want.stride())
    assert torch.distributions.Normal(mean.to(device), std.to(device)).sample().dtype == dtypes[0]


X = torch.linspace(-1, 1, 384).reshape(2, 4, 6, 8)
ATTENTION: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {
    "contiguous": (X, X, X),
    "heads side by side": (X.transpose(1, 2).contiguous().transpose(1, 2),) * 3,
    "causal": (X, X, X),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_gradients_of_attention_lie_as_on_the_cpu(device: torch.device, name: str) -> None:
    def strides(device: torch.device | str) -> list[tuple[int, ...]]:
        given = [x.to(device).requires_grad_() for x in ATTENTION[name]]
        y = F.scaled_dot_product_attention(*given, is_causal=name == "causal")
        return [x.stride() for x in (y, *torch.autograd.grad(y.square().sum(), given))]

    assert strides(device) == strides("cpu")
