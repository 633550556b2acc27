"""``torch.jit.trace`` of models on the device, which TensorBoard and counters of FLOPs use, too."""

from __future__ import annotations

import pytest
import torch
from torch import nn


@pytest.mark.filterwarnings("ignore")  # the tracer warns of sizes that are read, and of itself
@pytest.mark.parametrize("grad", [True, False])
def test_a_traced_convolution_is_no_constant(grad: bool, device: torch.device) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2)).eval()
    x, other = torch.randn(1, 2, 4, 4), torch.randn(1, 2, 4, 4)
    want = model(other)
    model.to(device)
    with torch.set_grad_enabled(grad):
        traced = torch.jit.trace(model, x.to(device), check_trace=False)
        assert "aten::_convolution" in str(traced.inlined_graph)
        torch.testing.assert_close(traced(other.to(device)).cpu(), want)
