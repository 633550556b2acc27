"""Making tensors on the device and moving them there and back, against the CPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import lazytpu
from lazytpu.tensors.tensor import LazyTensor
from tests.support.lockstep import differences

DEVICES = ["tpu", "tpu:0", torch.device("tpu"), torch.device("tpu", 0), lazytpu.device(), 0]


# --- factories ----------------------------------------------------------------------------------------------

FACTORIES = {
    "tensor": lambda d: torch.tensor([[1, 2.5], [3, 4]], device=d),
    "tensor_dtype": lambda d: torch.tensor([1, 2], dtype=torch.float16, device=d),
    "tensor_bool": lambda d: torch.tensor([True, False], device=d),
    "tensor_complex": lambda d: torch.tensor([1 + 2j], device=d),
    "tensor_scalar": lambda d: torch.tensor(3, device=d),
    "tensor_empty": lambda d: torch.tensor([], device=d),
    "tensor_of_numpy": lambda d: torch.tensor(np.arange(6.0).reshape(2, 3), device=d),
    "tensor_requires_grad": lambda d: torch.tensor([1.0], device=d, requires_grad=True),
    "as_tensor": lambda d: torch.as_tensor([1, 2], device=d),
    "as_tensor_of_numpy": lambda d: torch.as_tensor(np.float32([1, 2]), device=d),
    "asarray": lambda d: torch.asarray([1, 2.0], device=d),
    "scalar_tensor": lambda d: torch.scalar_tensor(2.0, device=d),
    "zeros": lambda d: torch.zeros(2, 3, device=d),
    "ones": lambda d: torch.ones((2, 0), device=d, dtype=torch.int8),
    "full": lambda d: torch.full((2,), 7, device=d),
    "full_bool": lambda d: torch.full((2,), True, device=d),
    "arange": lambda d: torch.arange(5, device=d),
    "arange_step": lambda d: torch.arange(1, 2, 0.25, device=d),
    "linspace": lambda d: torch.linspace(0, 1, 5, device=d),
    "logspace": lambda d: torch.logspace(0, 2, 3, device=d),
    "eye": lambda d: torch.eye(2, 3, device=d),
    "tril_indices": lambda d: torch.tril_indices(3, 3, device=d),
    "length_one": lambda d: torch.empty_strided((1, 3), (7, 1), device=d).fill_(2),
    "zeros_like": lambda d: torch.zeros_like(torch.ones(2, 3).t(), device=d),
    "ones_like": lambda d: torch.ones_like(torch.ones(2, device=d), dtype=torch.int64),
    "full_like": lambda d: torch.full_like(torch.ones(2, device=d), 3),
    "new_zeros": lambda d: torch.ones(2, device=d).new_zeros(3),
    "new_ones": lambda d: torch.ones(2, device=d).new_ones((2, 2), dtype=torch.bool),
    "new_full": lambda d: torch.ones(2, device=d).new_full((2,), 5),
    "new_tensor": lambda d: torch.ones(2, device=d).new_tensor([1, 2]),
    "new_from_cpu": lambda d: torch.ones(2).new_zeros(3, device=d),
    "empty_filled": lambda d: torch.empty(2, 3, device=d).fill_(1.5),
    "empty_strided": lambda d: torch.empty_strided((2, 3), (1, 2), device=d).fill_(2),
    "empty_permuted": lambda d: torch.empty_permuted((2, 3), (1, 0), device=d).fill_(2),
    "empty_channels_last": lambda d: torch.empty(1, 2, 3, 4, device=d, memory_format=torch.channels_last).zero_(),
    "empty_like": lambda d: torch.empty_like(torch.ones(3, 2, device=d).t()).fill_(1),
    "complex": lambda d: torch.complex(torch.ones(2, device=d), torch.zeros(2, device=d)),
    "from_numpy": lambda d: torch.from_numpy(np.arange(3)).to(d),
    "block_diag": lambda d: torch.block_diag(torch.ones(1, 1, device=d), torch.ones(2, 2, device=d)),
    "meshgrid": lambda d: torch.meshgrid(torch.arange(2, device=d), torch.arange(3, device=d), indexing="ij")[1],
}


@pytest.mark.parametrize("name", FACTORIES)
def test_factory(name):
    got = FACTORIES[name]("tpu")
    assert type(got) is LazyTensor and got.device == lazytpu.device()
    expected = FACTORIES[name]("cpu")
    assert list(differences(expected, got)) == []


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("number", [3, 2000.0, float("inf")])
def test_a_number_in_complex_halves(device, number):
    made = torch.full((2,), number, dtype=torch.complex32, device=device)
    assert made.dtype is torch.complex32 and made.to(torch.complex64).tolist() == [complex(number)] * 2


@pytest.mark.parametrize("device", DEVICES, ids=repr)
def test_ways_to_name_the_device(device):
    for made in (torch.ones(2, device=device), torch.ones(2).to(device), torch.tensor([1.0], device=device)):
        assert made.device == torch.device("tpu:0") and made.get_device() == 0


@pytest.mark.parametrize(
    "draw",
    [
        lambda d: torch.rand(1000, device=d),
        lambda d: torch.randn(1000, device=d),
        lambda d: torch.randint(0, 5, (1000,), device=d),
        lambda d: torch.randperm(1000, device=d),
        lambda d: torch.rand_like(torch.ones(1000, device=d)),
        lambda d: torch.randn_like(torch.ones(1000, device=d)),
        lambda d: torch.empty(1000, device=d).uniform_(-1, 1),
        lambda d: torch.empty(1000, device=d).normal_(),
        lambda d: torch.bernoulli(torch.full((1000,), 0.5, device=d)),
    ],
)
def test_random_factories_repeat_with_their_seed(draw):
    torch.manual_seed(1)
    first, second = draw("tpu"), draw("tpu")
    torch.manual_seed(1)
    assert torch.equal(draw("tpu"), first) and not torch.equal(first, second)
    expected = draw("cpu")
    assert (first.shape, first.dtype) == (expected.shape, expected.dtype)
    assert abs(first.double().mean().item() - expected.double().mean().item()) < 0.2 * (1 + expected.double().std())


def test_a_counter_past_int64_is_drawn_from(device):
    state = lazytpu.random.get_rng_state()
    far = torch.cat([state[:8], torch.tensor([2, 0, 0, 0, 0, 0, 0, 128], dtype=torch.uint8)])  # 2**63 + 2
    try:
        drawn = []
        for _ in range(3):  # the path is known the second time
            lazytpu.random.set_rng_state(far)
            drawn.append(torch.rand(4, device=device).tolist())
            lazytpu.mark_step()
    finally:
        lazytpu.random.set_rng_state(state)
    assert drawn[0] == drawn[1] == drawn[2]


# --- moving -------------------------------------------------------------------------------------------------


def other(device):
    return torch.ones(1, dtype=torch.float64, device=device)


MOVES = {
    "device": lambda t, d: t.to(d),
    "keyword": lambda t, d: t.to(device=d),
    "device_dtype": lambda t, d: t.to(d, torch.float16),
    "dtype": lambda t, d: t.to(torch.float64),
    "same_dtype": lambda t, d: t.to(torch.float32),
    "other": lambda t, d: t.to(other(d)),
    "non_blocking": lambda t, d: t.to(d, non_blocking=True),
    "copy": lambda t, d: t.to(d, copy=True),
    "copy_dtype": lambda t, d: t.to(torch.float32, copy=True),
    "memory_format": lambda t, d: t.to(d, memory_format=torch.channels_last),
    "contiguous_format": lambda t, d: t.to(d, torch.float64, memory_format=torch.contiguous_format),
    "type": lambda t, d: t.to(d).type(torch.int32),
    "type_as": lambda t, d: t.type_as(other(d)),
    "half": lambda t, d: t.to(d).half(),
    "bfloat16": lambda t, d: t.bfloat16().to(d),
    "clone": lambda t, d: t.to(d).clone(),
    "contiguous": lambda t, d: t.to(d).contiguous(),
}
SOURCES = {
    "plain": lambda: torch.arange(24.0).reshape(1, 2, 3, 4),
    "transposed": lambda: torch.arange(24.0).reshape(1, 4, 3, 2).transpose(1, 3),
    "channels_last": lambda: torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
    "sliced": lambda: torch.arange(96.0).reshape(2, 4, 3, 4)[1:, ::2],
    "expanded": lambda: torch.arange(6.0).reshape(1, 2, 3, 1).expand(1, 2, 3, 4),
}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("move", MOVES)
def test_to(move, source):
    expected = MOVES[move](SOURCES[source](), "cpu")
    from_cpu = MOVES[move](SOURCES[source](), "tpu")
    if from_cpu.is_tpu:
        assert from_cpu.stride() == expected.stride() or source in ("sliced", "expanded")
        assert from_cpu.dtype == expected.dtype and torch.equal(from_cpu.cpu(), expected)
    on_device = MOVES[move](SOURCES[source]().tpu(), "tpu")
    assert on_device.is_tpu and on_device.dtype == expected.dtype and torch.equal(on_device.cpu(), expected)
    back = MOVES[move](SOURCES[source]().tpu(), "cpu")
    assert back.dtype == expected.dtype and torch.equal(back.cpu(), expected)


def test_to_without_a_change_is_the_same_tensor(device):
    x = torch.ones(2, device=device)
    assert x.to(device) is x and x.to(torch.float32) is x and x.tpu() is x and x.to(x) is x and x.contiguous() is x
    assert x.to(device, copy=True) is not x
    y = torch.ones(2)
    assert y.cpu() is y and y.to(device) is not y


def test_a_move_is_differentiable(device):
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    (x.to(device).double() * torch.tensor([3.0, 4.0], device=device)).sum().cpu().backward()
    assert x.grad.tolist() == [3.0, 4.0] and x.grad.device.type == "cpu"
    y = torch.tensor([1.0], device=device, requires_grad=True)
    (y.cpu() * 5).sum().backward()
    assert y.grad.is_tpu and y.grad.tolist() == [5.0]


def test_what_the_user_overwrites_after_a_move_changes_nothing(device):
    for n in (3, 1 << 16):
        host = torch.ones(n)
        moved, non_blocking = host.to(device), host.to(device, non_blocking=True)
        host.zero_()
        assert moved.sum().item() == non_blocking.sum().item() == n
        back = moved.cpu()
        back.zero_()
        assert moved.sum().item() == n


def test_methods_named_after_the_device(device):
    x = torch.ones(2)
    assert (
        not x.is_tpu
        and x.tpu().is_tpu
        and x.tpu(0).is_tpu
        and x.tpu("tpu:0").is_tpu
        and x.tpu(non_blocking=True).is_tpu
    )
    assert nn.Linear(2, 2).tpu().weight.is_tpu
    packed = nn.utils.rnn.pack_padded_sequence(torch.ones(3, 2, 1), [3, 2]).tpu()
    assert packed.data.is_tpu and packed.is_tpu
    x = x.to(device)
    assert (
        x.type() == "torch.tpu.FloatTensor"
        and torch.ones(1, dtype=torch.int64, device=device).type() == "torch.tpu.LongTensor"
    )
    assert not x.type("torch.FloatTensor").is_tpu and torch.ones(2).type("torch.tpu.FloatTensor").is_tpu
    assert not x.is_cuda and not x.is_cpu and not x.is_meta
