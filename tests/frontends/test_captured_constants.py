"""Tensors that a captured function makes of Python's data, or that it closes over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import lazytpu
from tests.support.dynamo_marks import FRESH

pytestmark = FRESH

ARRAY = np.arange(4.0)
ON_HOST = torch.tensor([1.0, 2.0, 3.0, 4.0])
POSITIONS = [0, 2]


def assigned(a: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    a = a.clone()
    a[index] = value
    return a


def made_of_data(a: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what `torch.tensor` and its like make, used together with ``a`` f32[4]."""
    d = a.device
    twice = torch.tensor([1.0, 2.0, 3.0, 4.0], device=d)
    return {
        "list": a + torch.tensor([1.0, 2.0, 3.0, 4.0], device=d),
        "scalar": a * torch.tensor(2.5, device=d),
        "nested": a + torch.tensor([[1, 2, 3, 4], [4, 3, 2, 1]], device=d, dtype=a.dtype),
        "bool": torch.where(torch.tensor([True, False, True, True], device=d), a, 0),
        "complex": a * torch.tensor([1j, 2, 3, 4], device=d),
        "empty": torch.cat([a, torch.tensor([], device=d)]),
        "sizes": a * torch.tensor([a.shape[0], 1, 2, 3], device=d),
        "on the host": a + torch.tensor([1.0, 2.0, 3.0, 4.0]).to(d),
        "scalar on the host": a + torch.tensor(3.0),
        "written to": torch.tensor([1.0, 2.0, 3.0, 4.0], device=d).add_(a),
        "read": a + torch.tensor([3, 4], device=d).tolist()[1],
        "as_tensor": a + torch.as_tensor([1.0, 2.0, 3.0, 4.0], device=d),
        "from_numpy": a + torch.from_numpy(ARRAY).to(d),
        "numpy": a + torch.as_tensor(ARRAY, device=d),
        "new_tensor": a + a.new_tensor([1, 2, 3, 4]),
        "returned": twice,
        "used twice": (a + twice) * twice,
        "closed over": a + ON_HOST.to(d),
        "vmap": torch.vmap(lambda x: x * torch.tensor(2.0, device=d))(a),
        "loss": F.cross_entropy(a[None], torch.tensor([1], device=d), weight=twice),
    }


def indexed(a: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return parts of ``a`` f32[4], taken and written by all kinds of indices."""
    d = a.device
    return {
        "list": a[[0, 2]],
        "a list from outside": a[POSITIONS],
        "negative": a[[-1, -2]],
        "lists": a.view(2, 2)[[0, 1], [1, 0]],
        "slice and list": a.view(2, 2)[:, [1, 0]],
        "tensor": a[torch.tensor([0, 2], device=d)],
        "tensor on the host": a[torch.tensor([0, 2])],
        "scalar tensor": a[torch.tensor(1, device=d)],
        "slice to a tensor": a[1 : torch.tensor(3)],
        "numpy": a[np.array([0, 2])],
        "written by list": assigned(a, [0, 2], 5.0),
        "written by mask": assigned(a, a > 1, 5.0),
        "data written": assigned(a, [0, 2], torch.tensor([7.0, 8.0], device=d)),
        "gather": a.gather(0, torch.tensor([0, 2], device=d)),
        "one_hot": F.one_hot(torch.tensor([0, 2, 1], device=d), 4),
    }


def factories(a: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what factories make, for ``a`` f32[4]."""
    d, n = a.device, a.shape[0]
    return {
        "full": torch.full((4,), n, device=d) + a,
        "arange": torch.arange(n, device=d) + a,
        "eye": torch.eye(n, 4, device=d) @ a,
        "linspace": torch.linspace(0, 1, 4, device=d) * a,
        "empty": torch.empty(4, device=d).fill_(2) + a,
        "hann_window": torch.hann_window(4, device=d) * a,
        "scalar_tensor": torch.scalar_tensor(3.0, device=d) * a,
        "tril_indices": a[torch.tril_indices(4, 4, device=d)[0]],
        "new_full": a.new_full((4,), 3.0) + a,
        "new_ones": a.new_ones(a.shape) + a,
        "full_like": torch.full_like(a, 3) + a,
    }


CAPTURES: dict[str, Callable[..., Any]] = {
    "jit": lazytpu.jit,
    "dynamic": lambda function: torch.compile(function, backend="lazytpu", fullgraph=True, dynamic=True),
}


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("function", [made_of_data, indexed, factories])
def test_constants_are_what_they_are_on_the_cpu(function, capture, device):
    call, a = CAPTURES[capture](function), torch.arange(4.0) + 0.5
    want = function(a.clone().requires_grad_())
    x = a.to(device).requires_grad_(capture == "dynamic")
    for _ in range(2):
        got = call(x)
        for name in want:
            torch.testing.assert_close(got[name].detach().cpu(), want[name].detach(), msg=lambda m, n=name: f"{n}: {m}")
    if capture == "dynamic":
        sum(r.abs().sum() for r in got.values() if r.requires_grad).backward()
        y = a.clone().requires_grad_()
        sum(r.abs().sum() for r in function(y).values() if r.requires_grad).backward()
        torch.testing.assert_close(x.grad.cpu(), y.grad)


def test_checks_of_values_are_left_out(device):
    @lazytpu.jit
    def solved(a):
        torch._assert_async((a > -1).all())
        return torch.linalg.solve(a, a[0]) + torch.linalg.cholesky(a)[0] + torch.linalg.inv(a)[1]

    matrix = (torch.eye(3) * 2).to(device).requires_grad_()
    out = solved(matrix)
    torch.testing.assert_close(out.detach().cpu(), torch.tensor([1 + 2**0.5, 0.5, 0.0]))
    out.sum().backward()
    assert matrix.grad.isfinite().all()


def test_a_bound_outside_of_the_dtype(device):
    small = torch.arange(3).to(torch.uint8)

    def clamped(a):
        return a.clamp(-1, 1)

    torch.testing.assert_close(lazytpu.jit(clamped)(small.to(device)).cpu(), clamped(small))
    torch.testing.assert_close(clamped(small.to(device)).cpu(), clamped(small))


def test_conditions_in_conditions_of_any_size(device):
    def inner(x):
        return torch.cond(x.sum() > 4, lambda x: x + 1, lambda x: x + 2, (x,))

    def outer(x):
        return torch.cond(x.sum() > 0, inner, lambda x: x - 1, (x,))

    call = torch.compile(outer, backend="lazytpu", fullgraph=True, dynamic=True)
    for n, plus in ((3, 2.0), (5, 1.0)):
        torch.testing.assert_close(call(torch.ones(n).to(device)).cpu(), torch.ones(n) + plus)
