"""Which results of a compiled function share memory, and how they lie in it, are as on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import lazytpu
from tests.support.dynamo_marks import FRESH

pytestmark = FRESH
Tensor = torch.Tensor


def moved(x: Tensor) -> Any:
    y = x + 1
    y.as_strided_([], [], 1)
    return y


def expanded(x: Tensor) -> Any:
    return x[:2].sum().expand(2, 3)


def same(x: Tensor) -> Any:
    y = x * 2
    return y, y.to(y.dtype)


def part(x: Tensor) -> Any:
    return (x * 2)[1:]


def parts(x: Tensor) -> Any:
    y = x.sigmoid()
    return y, y.split(2)[1]


def whole_part(x: Tensor) -> Any:
    y = x.sigmoid()
    return y, y.split(4)[0], y.view_as(y)


def complex_part(x: Tensor) -> Any:
    y = x.split(2)[1]
    return y, torch.view_as_complex(y), y.view(torch.int32)


def detached(x: Tensor) -> Any:
    y = x + 1
    return y, y.detach()


def unsqueezed(x: Tensor) -> Any:
    y = x.detach().as_strided([], [], 1)
    y.unsqueeze_(0)
    return y


def lies(result: Any) -> list[Any]:
    found = result if isinstance(result, tuple) else (result,)
    first: dict[int, int] = {}
    places = [first.setdefault(t.untyped_storage()._cdata, i) for i, t in enumerate(found)]
    values = [torch.view_as_real(t + 0j).flatten().tolist() for t in found]
    return [(v, t.stride(), t.storage_offset(), p) for v, t, p in zip(values, found, places, strict=True)]


FUNCTIONS = [moved, expanded, same, part, parts, whole_part, complex_part, detached, unsqueezed]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_results_lie_as_on_the_cpu(function: Callable[[Tensor], Any]) -> None:
    x = torch.arange(4.0)
    compiled: Any = torch.compile(function, backend="lazytpu")
    got = compiled(x.to(lazytpu.device()).requires_grad_(function in (parts, whole_part, complex_part)))
    for (values, *place), (want, *expected) in zip(lies(got), lies(function(x)), strict=True):
        assert values == pytest.approx(want) and place == expected


@pytest.mark.parametrize("function", [same, parts, whole_part, detached])
def test_autograd_knows_the_views_of_results(function: Callable[[Tensor], Any]) -> None:
    def views(backend: str, x: Tensor) -> list[tuple[bool, bool]]:
        results = torch.compile(function, backend=backend)(x)
        torch._dynamo.reset()
        return [(t._is_view(), t._base is results[0]) for t in results]

    x = torch.arange(4.0)
    assert views("lazytpu", x.to(lazytpu.device())) == views("aot_eager", x)


def test_a_write_through_windows_of_integers() -> None:
    def write(x: Tensor) -> Tensor:
        x.unfold(0, 2, 2).mul_(3)
        y = x > 5
        y.unfold(0, 2, 2).logical_not_()
        return y

    x, y = torch.arange(4), torch.arange(4).to(lazytpu.device())
    assert torch.compile(write, backend="lazytpu")(y).tolist() == write(x).tolist()
    assert y.tolist() == x.tolist()


def test_a_replayed_copy_has_memory_of_its_own() -> None:
    @lazytpu.compile
    def copy(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y, torch.empty_like(y).copy_(y)

    x = torch.arange(3.0).to(lazytpu.device())
    for _ in range(4):
        y, z = copy(x)
        z.add_(1)
        assert y.tolist() == [0.0, 2.0, 4.0] and z.tolist() == [1.0, 3.0, 5.0]


def test_a_scalar_that_is_computed_twice_and_written() -> None:
    def write(x: Tensor) -> Tensor:
        y = x * 2
        a, b = -y[1], -y[1]  # one value, once `lazytpu.compile` has merged them
        y[0] = b
        y[1] = -y[1] * b
        y[2] = a * b
        return y

    x = torch.arange(4)
    step = lazytpu.compile(write)
    for _ in range(3):
        assert step(x.to(lazytpu.device())).tolist() == write(x).tolist()
