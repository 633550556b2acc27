"""Errors of the CPU about the values in a tensor: each kind stands in `op_status.BY_VALUE`, with what is done instead.

Recording does not look at values.  The indices among them are reported with ``config.check_bounds``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lazytpu.errors import OutOfBoundsError
from tests.support.op_checks import error_of
from tests.support.op_status import BY_VALUE

pytestmark = pytest.mark.filterwarnings("ignore:torch.cholesky:UserWarning", "ignore:index_reduce")
nan = float("nan")
Tensor = Callable[..., torch.Tensor]  # makes a tensor of what a list holds

POSITIONS: dict[str, Callable[[Tensor], Any]] = {
    "index": lambda x: x([1.0])[x([5])],
    "take": lambda x: x([1.0]).take(x([5])),
    "index_select": lambda x: x([1.0]).index_select(0, x([5])),
    "embedding with max_norm": lambda x: F.embedding(x([7]), x([[1.0, 2]]), max_norm=1.0),
    "max_unpool": lambda x: F.max_unpool1d(x([[[1.0]]]), x([[[7]]]), 2),
    "an index of embedding_bag": lambda x: F.embedding_bag(x([5]), x([[1.0]]), x([0])),
    "an offset of embedding_bag": lambda x: F.embedding_bag(x([0, 0]), x([[1.0]]), x([0, 5])),
    "nll_loss": lambda x: F.nll_loss(x([[1.0, 2]]), x([5])),
    "multi_margin_loss": lambda x: F.multi_margin_loss(x([[1.0, 2]]), x([5])),
    "multilabel_margin_loss": lambda x: F.multilabel_margin_loss(x([[1.0, 2]]), x([[5, -1]])),
    "one_hot": lambda x: F.one_hot(x([3]), 2),
    "masked_scatter": lambda x: x([1.0, 2]).masked_scatter(x([True, True]), x([1.0])),
    "searchsorted": lambda x: torch.searchsorted(x([1.0, 2]), x([1.0]), sorter=x([5, 6])),
    "lu_unpack": lambda x: torch.lu_unpack(x([[1.0, 0], [0, 1]]), x([5, 6]).int())[0],
    "lu_solve": lambda x: torch.linalg.lu_solve(x([[1.0, 0], [0, 1]]), x([5, 6]).int(), x([[1.0], [1]])),
    "quantile": lambda x: torch.quantile(x([1.0, 2]), x([1.5])),
}
VALUES: dict[str, Callable[[Tensor], Any]] = {
    "the first offset of embedding_bag": lambda x: F.embedding_bag(x([0, 0]), x([[1.0]]), x([1])),
    "multinomial": lambda x: torch.multinomial(x([-1.0, 1]), 1),
    "multinomial of nothing": lambda x: torch.multinomial(x([0.0, 0]), 1),
    "bernoulli": lambda x: torch.bernoulli(x([2.0])),
    "normal": lambda x: torch.normal(x([0.0]), x([-1.0])),
    "poisson": lambda x: torch.poisson(x([-1.0])),
    "binary_cross_entropy": lambda x: F.binary_cross_entropy(x([2.0]), x([1.0])),
    "histc": lambda x: torch.histc(x([nan, 1.0]), 4),
    "floor_divide": lambda x: x([1]) // x([0]),
    "remainder": lambda x: x([1]) % x([0]),
    "segment_reduce": lambda x: torch.segment_reduce(x([1.0, 2]), "sum", lengths=x([1])),
    "svd": lambda x: torch.linalg.svd(x([[nan, 0], [0, 1]]))[1],
    "eig": lambda x: torch.linalg.eig(x([[nan, 0], [0, 1]]))[0],
    "cholesky_inverse": lambda x: torch.cholesky_inverse(x([[0.0, 0], [0, 1]])),
}
# Factorizations that torch itself checks by reading: the error of the CPU, at the call.
CHECKED: dict[str, Callable[[Tensor], Any]] = {
    "linalg.cholesky": lambda x: torch.linalg.cholesky(x([[-1.0, 0], [0, 1]])),
    "linalg.inv": lambda x: torch.linalg.inv(x([[0.0, 0], [0, 0]])),
    "linalg.solve": lambda x: torch.linalg.solve(x([[0.0, 0], [0, 0]]), x([1.0, 1])),
    "linalg.lu_factor": lambda x: torch.linalg.lu_factor(x([[0.0, 0], [0, 0]]))[0],
}
if hasattr(torch.ops.aten, "cholesky"):
    CHECKED["cholesky"] = lambda x: torch.cholesky(x([[-1.0, 0], [0, 1]]))


def on(device: Any) -> Tensor:
    return lambda values: torch.tensor(values).to(device)


@pytest.mark.parametrize("call", VALUES.values(), ids=VALUES)
def test_a_value_is_not_refused_and_the_table_says_so(call: Callable[[Tensor], Any], device: torch.device) -> None:
    _, refused = error_of(call, on("cpu"))
    assert any(re.search(pattern, str(refused)) for pattern in BY_VALUE)
    assert isinstance(call(on(device)).cpu(), torch.Tensor)


@pytest.mark.parametrize("call", POSITIONS.values(), ids=POSITIONS)
def test_a_position_is_reported_with_check_bounds(
    call: Callable[[Tensor], Any], device: torch.device, checks: None
) -> None:
    _, refused = error_of(call, on("cpu"))
    assert any(re.search(pattern, str(refused)) for pattern in BY_VALUE)
    with pytest.raises(OutOfBoundsError, match="out of bounds"):
        call(on(device)).cpu()


@pytest.mark.parametrize("call", CHECKED.values(), ids=CHECKED)
def test_a_factorization_that_fails_raises_the_error_of_the_cpu(
    call: Callable[[Tensor], Any], device: torch.device
) -> None:
    _, expected = error_of(call, on("cpu"))
    _, error = error_of(call, on(device))
    assert expected is not None
    assert (type(error), str(error)) == (type(expected), str(expected))


def test_each_kind_of_the_table_has_a_call() -> None:
    said = [str(error_of(call, on("cpu"))[1]) for call in (POSITIONS | VALUES).values()]
    assert [p for p in BY_VALUE if not any(re.search(p, text) for text in said)] == []
