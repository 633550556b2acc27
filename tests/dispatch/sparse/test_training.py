"""Gradients of sparse tensors, sparse gradients, optimizers that take them, and keeping them."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

import lazytpu

pytestmark = pytest.mark.filterwarnings("ignore:Sparse", "ignore:Validating sparse")
DEVICES = (torch.device("cpu"), lazytpu.device())
Tensors = tuple[torch.Tensor, ...]


def coo(device: torch.device, *, csr: bool = False) -> torch.Tensor:
    x = torch.sparse_coo_tensor([[0, 1, 1, 0], [2, 0, 2, 2]], torch.tensor([3.0, 4, 5, 6]), (2, 3)).to(device)
    return (x.to_sparse_csr() if csr else x).requires_grad_()


def dense(device: torch.device, *size: int) -> torch.Tensor:
    return torch.arange(6.0, device=device).view(size).requires_grad_()


def products(device: torch.device) -> Tensors:
    u, d = coo(device), dense(device, 3, 2)
    torch.sparse.mm(u, d).pow(2).sum().backward()
    return u.grad, d.grad


def plain_products(device: torch.device) -> Tensors:
    u, d = coo(device), dense(device, 3, 2)
    (u @ d).pow(2).sum().backward()
    return u.grad, d.grad


def csr_products(device: torch.device) -> Tensors:
    u, d = coo(device, csr=True), dense(device, 3, 2)
    (u @ d).pow(2).sum().backward()
    return u.grad, d.grad


def sparse_products(device: torch.device) -> Tensors:
    u, w = coo(device), coo(device)
    torch.sparse.mm(u, w.t()).to_dense().pow(2).sum().backward()
    return u.grad, w.grad


def values(device: torch.device) -> Tensors:
    v = dense(device, 6)
    places = torch.tensor([[0, 1, 1, 0, 0, 1], [2, 0, 2, 2, 1, 1]], device=device)
    torch.sparse_coo_tensor(places, v, (2, 3)).coalesce().values().pow(2).sum().backward()
    return (v.grad,)


def to_and_fro(device: torch.device) -> Tensors:
    d, u = dense(device, 2, 3), coo(device)
    (d.to_sparse().to_dense() * u.to_dense()).sum().backward()
    return d.grad, u.grad


def sums(device: torch.device) -> Tensors:
    u, d = coo(device), dense(device, 2, 3)
    (torch.sparse.sum(u, 0).to_dense().pow(2).sum() + (d + u).pow(2).sum() + (u + 2 * u).to_dense().sum()).backward()
    return u.grad, d.grad


def normalized(device: torch.device) -> Tensors:
    u = coo(device)
    (torch.sparse.softmax(u, 1).to_dense()[:, 0] * torch.sparse.log_softmax(u, 1).to_dense()[:, 2]).sum().backward()
    assert u.grad is not None
    return (u.grad.coalesce(),)


def masked(device: torch.device) -> Tensors:
    d = dense(device, 2, 3)
    d.sparse_mask(coo(device).detach().coalesce()).to_dense().pow(2).sum().backward()
    return (d.grad,)


def accumulated(device: torch.device) -> Tensors:
    torch.manual_seed(0)
    layer = nn.Embedding(12, 4, sparse=True).to(device)
    for i in range(2):
        layer(torch.tensor([1, 2, i], device=device)).pow(2).sum().backward()
    return (layer.weight.grad,)


def bags(device: torch.device) -> Tensors:
    torch.manual_seed(0)
    layer = nn.EmbeddingBag(12, 4, sparse=True, mode="mean").to(device)
    layer(torch.tensor([1, 2, 1, 5], device=device), torch.tensor([0, 3], device=device)).pow(2).sum().backward()
    return (layer.weight.grad,)


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    """Check layout, places and values of a device tensor against the CPU's."""
    assert a.layout is b.layout and a.shape == b.shape
    if a.layout is torch.sparse_coo:
        assert a.is_coalesced() == b.is_coalesced()
        assert torch.equal(a._indices(), b._indices().cpu())
        a, b = a._values(), b._values()
    elif a.layout is not torch.strided:
        a, b = a.to_dense(), b.to_dense()
    torch.testing.assert_close(b.detach().cpu(), a.detach())


GRADIENTS = [
    products,
    plain_products,
    csr_products,
    sparse_products,
    values,
    to_and_fro,
    sums,
    normalized,
    masked,
    accumulated,
    bags,
]


@pytest.mark.parametrize("case", GRADIENTS)
def test_gradients(case: Callable[[torch.device], Tensors]) -> None:
    cpu, ours = (case(device) for device in DEVICES)
    for a, b in zip(cpu, ours, strict=True):
        same(a, b)


OPTIMIZERS: dict[str, Callable[[list[torch.Tensor]], torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "SparseAdam": partial(torch.optim.SparseAdam, lr=0.1),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_embedding_with_sparse_gradients(name: str) -> None:
    trained = []
    for device in DEVICES:
        torch.manual_seed(0)
        layer = nn.Embedding(12, 4, sparse=True, padding_idx=3).to(device)
        optimizer = OPTIMIZERS[name]([layer.weight])
        for i in range(3):
            optimizer.zero_grad()
            layer(torch.tensor([[1, 2, 1], [i, 5, 3]], device=device)).pow(3).sum().backward()
            assert layer.weight.grad is not None and layer.weight.grad.is_sparse
            optimizer.step()
        trained.append(layer.weight)
    torch.testing.assert_close(trained[1].detach().cpu(), trained[0].detach())


def test_coalescing_reads_places_and_no_values() -> None:
    x = coo(lazytpu.device()).detach()
    lazytpu.mark_step(wait=True)
    y = torch.sparse_coo_tensor(x._indices(), x._values() * 2, x.shape)
    lazytpu.metrics.reset()
    z = y.coalesce()
    assert z._nnz() == 3
    assert lazytpu.metrics.counter("cut") == 0  # the indices were there; the values are still to be computed
    assert "aten.mul" in lazytpu.ir_text(z.values())


def test_a_dense_matrix_is_read_once_for_csc() -> None:
    x = torch.eye(3).to(lazytpu.device())
    lazytpu.metrics.reset()
    assert (x + 1).to_sparse_csc()._nnz() == 9
    assert lazytpu.metrics.counter("cut") == 2  # where it is not zero, and the number of values in each column


KEPT: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "save": lambda x: loaded(x),
    "cpu": lambda x: x.cpu(),
    "detach": lambda x: x.detach(),
    "data": lambda x: x.data,
}


def loaded(x: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save({"x": x}, file)
    file.seek(0)
    found: torch.Tensor = torch.load(file)["x"]
    return found


@pytest.mark.parametrize("csr", [False, True])
@pytest.mark.parametrize("way", KEPT)
def test_keeping(way: str, csr: bool) -> None:
    x = coo(lazytpu.device(), csr=csr).detach()
    same(x.cpu(), KEPT[way](x))


def test_deepcopy_shares_nothing() -> None:
    x = coo(lazytpu.device()).detach()
    y = copy.deepcopy(x)
    y._values().zero_()
    assert x.sum().item() == 18


@pytest.mark.parametrize("csr", [False, True])
def test_printing(csr: bool) -> None:
    x = coo(lazytpu.device(), csr=csr)
    text = repr(x * 2)
    assert text.replace(f"device='{x.device}', ", "").split() == repr(x.detach().cpu().requires_grad_() * 2).split()
    assert f"device='{x.device}'" in text


def test_a_product_in_a_compiled_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazytpu.config, "compile_after", 1)
    for a, b in zip(*(products(device) for device in DEVICES), strict=True):
        same(a, b)
