"""Functional collectives in a world of one: what the CPU gives there, without leaving the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from lazytpu.errors import LazyTPUError
from lazytpu.observe import metrics

if not dist.is_available():
    pytest.skip("torch is built without torch.distributed", allow_module_level=True)
from torch.distributed import _functional_collectives as collectives

pytestmark = pytest.mark.filterwarnings("ignore")
ops = torch.ops._c10d_functional
X = torch.arange(6.0).reshape(3, 2)

CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "all_reduce": lambda x: ops.all_reduce(x, "sum", "0"),
    "all_reduce avg": lambda x: ops.all_reduce(x, "avg", "0") if x.device.type != "cpu" else x.clone(),
    "all_reduce_": lambda x: ops.all_reduce_(x.clone(), "max", "0"),
    "all_reduce_coalesced": lambda x: ops.all_reduce_coalesced([x, x + 1], "sum", "0"),
    "all_reduce_coalesced_": lambda x: ops.all_reduce_coalesced_([x.clone(), x + 1], "sum", "0"),
    "all_gather_into_tensor": lambda x: ops.all_gather_into_tensor(x, 1, "0"),
    "all_gather_into_tensor_coalesced": lambda x: ops.all_gather_into_tensor_coalesced([x, x[0]], 1, "0"),
    "all_gather_into_tensor_out": lambda x: ops.all_gather_into_tensor_out(x, 1, "0", out=torch.empty_like(x)),
    "reduce_scatter_tensor": lambda x: ops.reduce_scatter_tensor(x, "sum", 1, "0"),
    "reduce_scatter_tensor_coalesced": lambda x: ops.reduce_scatter_tensor_coalesced([x, x[0]], "sum", 1, "0"),
    "all_to_all_single": lambda x: ops.all_to_all_single(x, [3], [3], "0"),
    "broadcast": lambda x: ops.broadcast(x, 0, "0"),
    "broadcast_": lambda x: ops.broadcast_(x.clone(), 0, "0"),
    "of a transposed tensor": lambda x: ops.all_gather_into_tensor(x.t().contiguous(), 1, "0"),
}
WITH_GRADIENT: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "all_gather": lambda x, g: collectives.all_gather_tensor_autograd(x, 0, g),
    "reduce_scatter": lambda x, g: collectives.reduce_scatter_tensor_autograd(x, "sum", 0, g),
    "all_to_all": lambda x, g: collectives.all_to_all_single_autograd(x, [3], [3], g),
}


@pytest.fixture
def world() -> Iterator[Any]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield dist.group.WORLD
    dist.destroy_process_group()


def results(call: Callable[[torch.Tensor], Any], x: torch.Tensor) -> list[torch.Tensor]:
    return [ops.wait_tensor(t) for t in tree_leaves(call(x))]


@pytest.mark.parametrize("name", CALLS)
def test_equals_the_cpu(device: torch.device, world: Any, name: str) -> None:
    metrics.reset()
    got, want = results(CALLS[name], X.to(device)), results(CALLS[name], X.clone())
    assert not metrics.counter("cut")
    assert not metrics.fallbacks()
    for g, w in zip(got, want, strict=True):
        assert g.device == device
        assert torch.equal(g.cpu(), w)


def test_results_are_copies_but_for_those_in_place(device: torch.device, world: Any) -> None:
    x = X.to(device)
    ops.wait_tensor(ops.all_reduce(x, "sum", "0")).zero_()
    assert torch.equal(x.cpu(), X)
    assert ops.all_reduce_(x, "sum", "0").data_ptr() == x.data_ptr()


@pytest.mark.parametrize("name", WITH_GRADIENT)
def test_gradients(device: torch.device, world: Any, name: str) -> None:
    x = X.to(device).requires_grad_()
    out = WITH_GRADIENT[name](x, world)
    (out * out).sum().backward()
    assert torch.equal(x.grad.cpu(), 2 * X)


def test_the_public_functions(device: torch.device, world: Any) -> None:
    x = X.to(device)
    for out in (
        collectives.all_reduce(x, "sum", world),
        collectives.all_gather_tensor(x, 0, world),
        collectives.reduce_scatter_tensor(x, "sum", 0, world),
        collectives.broadcast(x, 0, world),
    ):
        assert torch.equal((out + 1).cpu(), X + 1)


def test_without_a_process_group(device: torch.device) -> None:
    assert torch.equal(ops.wait_tensor(ops.all_reduce(X.to(device), "sum", "0")).cpu(), X)


def test_a_larger_world_is_refused(device: torch.device) -> None:
    with pytest.raises(LazyTPUError, match="a collective of 2 processes"):
        ops.all_gather_into_tensor(X.to(device), 2, "0")


def test_splits_that_do_not_fit(device: torch.device, world: Any) -> None:
    with pytest.raises(ValueError, match="3 rows in a world of one"):
        ops.all_to_all_single(X.to(device), [2], [3], "0")
