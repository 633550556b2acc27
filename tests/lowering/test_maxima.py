"""Softmax and its like where a row has NaN, infinities, or nothing that counts."""

from __future__ import annotations

import jax
import pytest
import torch
import torch.nn.functional as F

import lazytpu
from lazytpu.lowering.registry import lowering_for
from lazytpu.lowering.support.maxima import shift

NAN, INF = float("nan"), float("inf")
ROWS = torch.tensor(
    [
        [1.0, NAN, 2.0, 0.0],
        [NAN, -INF, -INF, -INF],
        [-INF, -INF, -INF, -INF],
        [INF, 1.0, 2.0, 3.0],
        [-INF, 1.0, 2.0, 3.0],
        [88.0, 1e30, -1e30, 3.0],
    ]
)


@pytest.mark.parametrize("dim", [0, 1])
def test_rows_with_nan_and_infinities_are_those_of_the_cpu(
    device: torch.device, monkeypatch: pytest.MonkeyPatch, dim: int
) -> None:
    masked = ROWS.clone().requires_grad_()
    moved = ROWS.to(device).requires_grad_()

    def results(x: torch.Tensor) -> list[torch.Tensor]:
        made = [F.softmax(x, dim), F.log_softmax(x, dim), torch.logsumexp(x, dim)]
        sum(y.nan_to_num(0.0, 0.0, 0.0).sum() for y in made).backward()
        return [*made, x.grad]

    monkeypatch.setattr(lazytpu.config, "compile_after", 1)
    found = [y.cpu() for y in results(moved)]
    for mine, expected in zip(found, results(masked), strict=True):
        torch.testing.assert_close(mine, expected, equal_nan=True)


def test_the_shift_is_a_constant_to_jax() -> None:
    def logs(x: jax.Array) -> jax.Array:
        return (jax.numpy.log(jax.numpy.exp(x - shift(x, -1, keepdims=True)).sum(-1)) + shift(x, -1)).sum()

    x = jax.numpy.arange(6.0).reshape(2, 3)
    with lowering_for("cpu"):
        gradient = jax.grad(logs)(x)
    torch.testing.assert_close(torch.tensor(gradient.tolist()), torch.softmax(torch.tensor(x.tolist()), -1))
