"""``as_strided`` inside a compiled function reads the memory of the storage, whatever view it is called on."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import lazytpu
from tests.support.dynamo_marks import FRESH

pytestmark = FRESH
Tensor = torch.Tensor


def of_a_transpose(x: Tensor) -> Tensor:
    return x.t().as_strided([1, 2], [1, 1], 3) * 3


def of_a_part(x: Tensor) -> Tensor:
    return x[1:].as_strided([1, 2], [1, 1], 0) * 3


def from_where_a_part_begins(x: Tensor) -> Tensor:
    return x[1:].as_strided([2, 2], [3, 1]) * 3


def of_a_new_transpose(x: Tensor) -> Tensor:
    return (x * 2).t().contiguous().t().as_strided([4], [2], 1)


def of_a_part_of_several(x: Tensor) -> Tensor:
    return (x + 1).split(1, 1)[2].as_strided([3], [1], 1)


def written(x: Tensor) -> Tensor:
    y = x * 2
    y.as_strided([2], [4], 1).mul_(10)
    return y.t()


def in_place(x: Tensor) -> Tensor:
    y = (x * 2).t().clone()  # keeps the strides of the transpose
    y.as_strided_([4], [1], 1)
    y.mul_(10)
    return y + 1


FUNCTIONS = [
    of_a_transpose,
    of_a_part,
    from_where_a_part_begins,
    of_a_new_transpose,
    of_a_part_of_several,
    written,
    in_place,
]


WIDE = torch.arange(12.0).view(4, 3)


@pytest.mark.parametrize("begin", [0, 1])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_values_and_gradients(device: torch.device, function: Callable[[Tensor], Tensor], begin: int) -> None:
    """Also where the argument is a view with an offset of its own."""
    expected = WIDE.clone()[begin : begin + 3].requires_grad_()
    found = WIDE.to(device)[begin : begin + 3].detach().requires_grad_()
    ours = torch.compile(function, backend="lazytpu")(found)
    theirs = function(expected)
    torch.testing.assert_close(ours.cpu(), theirs)
    ours.sum().backward()
    theirs.sum().backward()
    assert found.grad is not None
    torch.testing.assert_close(found.grad.cpu(), expected.grad)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_an_argument_that_begins_elsewhere_than_the_first(
    device: torch.device, function: Callable[[Tensor], Tensor]
) -> None:
    ours = lazytpu.jit(function)
    for begin in (0, 1):
        part = WIDE.clone()[begin : begin + 3]
        torch.testing.assert_close(ours(WIDE.to(device)[begin : begin + 3]).cpu(), function(part))


def test_a_function_of_arrays_refuses_what_it_does_not_have(device: torch.device) -> None:
    class Module(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return of_a_transpose(x)

    program = torch.export.export(Module(), (torch.ones(3, 3),))
    with pytest.raises(lazytpu.errors.LazyTPUError, match="reads the memory that lies behind it"):
        lazytpu.export.stablehlo(program)
