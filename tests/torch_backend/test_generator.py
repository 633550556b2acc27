"""``torch.Generator`` of the device."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import lazytpu


def test_it_is_of_the_device_and_repeats(device: torch.device) -> None:
    made = torch.Generator(device=device)
    assert made.device == device and isinstance(made, torch.Generator)
    assert made.manual_seed(7) is made and made.initial_seed() == 7
    first = torch.rand(4, generator=made, device=device)
    second = torch.rand(4, generator=made, device=device)
    made.manual_seed(7)
    assert torch.equal(torch.rand(4, generator=made, device=device).cpu(), first.cpu())
    assert not torch.equal(first.cpu(), second.cpu())
    assert isinstance(made.seed(), int)


@pytest.mark.parametrize("where", ["tpu", "tpu:0", torch.device("tpu", 0)])
def test_ways_to_name_the_device(where: object) -> None:
    assert torch.Generator(where).device == lazytpu.device()


def test_states_are_kept_and_given_back(device: torch.device) -> None:
    made = torch.Generator(device).manual_seed(1)
    state = made.get_state()
    first = torch.randn(3, generator=made, device=device).cpu()
    for other in (made.clone_state(), pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
        assert other.device == device and torch.equal(other.get_state(), made.get_state())
    made.set_state(state)
    assert torch.equal(torch.randn(3, generator=made, device=device).cpu(), first)


def test_ops_that_take_one(device: torch.device) -> None:
    def draw() -> list[torch.Tensor]:
        g = torch.Generator(device).manual_seed(5)
        x = torch.full((3, 4), 0.25, device=device)
        return [
            torch.randint(0, 9, (5,), generator=g, device=device),
            torch.randperm(6, generator=g, device=device),
            torch.bernoulli(x, generator=g),
            torch.multinomial(x, 2, generator=g),
            torch.normal(x, 1.0, generator=g),
            x.clone().uniform_(generator=g),
            x.clone().random_(0, 100, generator=g),
        ]

    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(draw(), draw(), strict=True))


def test_loaders_take_one(device: torch.device) -> None:
    data = TensorDataset(torch.arange(10))

    def order() -> list[int]:
        g = torch.Generator(device).manual_seed(2)
        return [
            int(i)
            for (batch,) in DataLoader(data, batch_size=5, sampler=RandomSampler(data, generator=g))
            for i in batch
        ]

    assert order() == order() != list(range(10))


def test_other_devices_have_torch_s_own() -> None:
    assert type(torch.Generator()) is torch._C.Generator and torch.Generator("cpu").device.type == "cpu"
    assert isinstance(torch.default_generator, torch.Generator)
    assert not isinstance(3, torch.Generator)
    with pytest.raises(RuntimeError):
        torch.Generator("nonsense")
