"""Tensors without elements: the results, the gradients and the errors of the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.support.lockstep import differences, outcome

Zeros = Callable[..., torch.Tensor]

CALLS: dict[str, Callable[[Zeros], Any]] = {
    "topk": lambda x: torch.topk(x(0, 10, 5), 3),
    "topk of a row of none": lambda x: torch.topk(x(2, 0), 0),
    "grid_sample": lambda x: F.grid_sample(x(0, 2, 3, 3), x(0, 4, 4, 2), align_corners=False),
    "grid_sample of volumes": lambda x: F.grid_sample(x(0, 2, 3, 3, 3), x(0, 4, 4, 4, 3), align_corners=False),
    "interpolate": lambda x: F.interpolate(x(0, 2, 3), 5),
    "interpolate images": lambda x: F.interpolate(x(0, 2, 3, 3), 5, mode="nearest-exact"),
    "interpolate volumes": lambda x: F.interpolate(x(0, 2, 3, 3, 3), 5),
    "max_pool2d": lambda x: F.max_pool2d(x(0, 2, 4, 4), 2),
    "max_pool3d": lambda x: F.max_pool3d(x(0, 2, 4, 4, 4), 2),
    "attention": lambda x: F.scaled_dot_product_attention(x(0, 2, 3, 4), x(0, 2, 3, 4), x(0, 2, 3, 4)),
    "logcumsumexp": lambda x: x(0, 3).logcumsumexp(0),
    "matrix_exp": lambda x: torch.matrix_exp(x(0, 3, 3)),
    "matrix_exp of no rows": lambda x: torch.matrix_exp(x(2, 0, 0)),
    "_unsafe_masked_index": lambda x: torch.ops.aten._unsafe_masked_index(
        x(0, 3).detach(), x(2).detach() == 0, [x(2).detach().long(), x(2).detach().long()], 7.0
    ),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_results_and_gradients(call: Callable[[Zeros], Any], device: torch.device) -> None:
    def run(on: Any) -> Any:
        made: list[torch.Tensor] = []

        def zeros(*size: int) -> torch.Tensor:
            made.append(torch.zeros(*size, device=on, requires_grad=True))
            return made[-1]

        result = call(zeros)
        leaf = next((t for t in (result if isinstance(result, tuple) else [result]) if t.requires_grad), None)
        grads = [] if leaf is None else torch.autograd.grad(leaf.sum(), made)
        return [result, [(tuple(g.shape), g.tolist()) for g in grads]]

    assert list(differences(outcome(lambda: run("cpu")), outcome(lambda: run(device)), loosely=True)) == []
