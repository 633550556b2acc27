"""Storages, and copies of tensors that share them."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from torch import nn

import lazytpu
from tests.support.lockstep import differences


def test_storage(device):
    x = torch.arange(6.0, device=device).reshape(2, 3)
    storage = x.untyped_storage()
    assert storage.nbytes() == len(storage) == storage.size() == 24 and storage.device == device
    assert x[1:].untyped_storage().data_ptr() == storage.data_ptr() == x.data_ptr() != 0
    assert x[1].data_ptr() == x.data_ptr() + 12 and x.detach().data_ptr() == x.data_ptr()
    assert x.view(torch.int32).data_ptr() == x[...].data_ptr() == torch.detach(x).data_ptr() == x.data_ptr()
    assert x.clone().data_ptr() != x.data_ptr() and torch.empty(0, device=device).data_ptr() == 0
    addresses = sorted((t.data_ptr(), t.nbytes) for t in [torch.ones(100, device=device) for _ in range(20)])
    assert all(a + n <= b for (a, n), (b, _) in zip(addresses, addresses[1:], strict=False))
    assert bytes(storage.tolist()) == bytes(storage.cpu().tolist()) == x.cpu().numpy().tobytes()
    copied = storage.clone()
    x.zero_()
    assert torch.empty(0, device=device).set_(copied, 0, (6,), (1,)).tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(NotImplementedError, match="to change it, use the tensor"):
        storage.fill_(0)
    moved = torch.arange(3.0).untyped_storage().tpu()
    assert torch.empty(0, device=device).set_(moved, 0, (3,), (1,)).tolist() == [0, 1, 2]
    assert x.element_size() == 4 and x.nbytes == 24 and x.itemsize == 4


def test_a_storage_of_the_cpu_takes_the_contents_of_one_of_the_device(device):
    x = (torch.arange(6.0, device=device) * 2).reshape(2, 3)
    storage = x[1].untyped_storage()
    copied = type(storage)(storage.nbytes(), device="cpu")
    copied.copy_(storage, non_blocking=True)
    assert copied.device.type == "cpu" and torch.empty(0).set_(copied, 3, (3,), (1,)).tolist() == [6, 8, 10]
    with pytest.raises(RuntimeError, match="size does not match, self was 8 bytes but src was 24 bytes"):
        torch.UntypedStorage(8).copy_(storage)


def test_swap_tensors(device):
    a, b = torch.ones(2, device=device), torch.zeros(3, dtype=torch.int64)
    ida, idb = id(a), id(b)
    torch.utils.swap_tensors(a, b)
    assert (id(a), id(b)) == (ida, idb)
    assert a.tolist() == [0, 0, 0] and a.device.type == "cpu" and b.tolist() == [1, 1] and b.is_tpu
    b.add_(1)
    assert b.tolist() == [2, 2]


def test_copy(device):
    x = torch.ones(2, device=device)
    x.note = "kept"
    y = copy.copy(x)
    assert y is not x and y.note == "kept"
    y.add_(1)
    assert x.tolist() == [2, 2]
    z = copy.deepcopy(x)
    z.add_(1)
    assert x.tolist() == [2, 2] and z.tolist() == [3, 3] and z.note == "kept"


def deepcopies(device):
    x = torch.arange(6.0, device=device)
    tied = nn.Parameter(torch.ones(2, device=device))
    leaf = torch.ones(2, device=device, requires_grad=True)
    (leaf * 3).sum().backward()
    given = {"x": x, "part": x[1:3], "t": x.reshape(2, 3).t(), "again": x, "p": [tied, tied], "leaf": leaf}
    given["c"] = torch.tensor([1 + 2j], device=device).conj()
    out = copy.deepcopy(given)
    out["part"].mul_(10)
    with torch.no_grad():
        out["p"][0].add_(1)
    assert out["x"] is out["again"]
    return (
        [given[k] for k in ("x", "part", "t", "leaf", "c")],
        [out[k] for k in ("x", "part", "t", "leaf", "c")],
        [
            given["p"][0],
            *out["p"],
            out["leaf"].grad,
        ],
    )


def test_deepcopy_keeps_aliases():
    expected, got = deepcopies("cpu"), deepcopies("tpu")
    assert list(differences([e[:3] for e in expected[:2]], [g[:3] for g in got[:2]])) == []
    assert list(differences(expected[2], got[2])) == []
    assert got[1][4].resolve_conj().tolist() == [1 - 2j]
    assert got[2][1] is got[2][2] and isinstance(got[2][1], nn.Parameter)


def test_deepcopy_of_what_is_no_leaf(device):
    errors = []
    for x in (torch.ones(2, requires_grad=True) * 2, torch.ones(2, requires_grad=True, device=device) * 2):
        with pytest.raises(RuntimeError) as caught:
            copy.deepcopy(x)
        errors.append(str(caught.value))
    assert errors[0] == errors[1] and "graph leaves" in errors[0]


def test_deepcopy_of_a_tensor_that_cpp_made(device):
    x = torch.Tensor.detach(torch.ones(2, device=device))
    assert type(x) is torch.Tensor
    y = copy.deepcopy(x)
    y.add_(1)
    assert x.tolist() == [1, 1] and y.tolist() == [2, 2]


def test_deepcopy_takes_no_memory_until_a_write(device):
    x = torch.zeros(1 << 16, device=device)
    lazytpu.wait()
    gc.collect()  # what tests before this one left
    before = torch.tpu.memory_allocated()
    y = copy.deepcopy(x)
    lazytpu.wait()
    assert torch.tpu.memory_allocated() == before
    y.add_(1)
    x.sub_(1)
    assert y.sum().item() == 1 << 16 and x.sum().item() == -(1 << 16)
