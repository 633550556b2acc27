"""Tensors of the CPU and of the device in one op: what torch refuses is refused, and nothing is written."""

from __future__ import annotations

import pytest
import torch

REFUSED = {
    "add_": lambda host, x: host.add_(x),
    "of a number": lambda host, x: host[0].add_(x[0]),
    "mul_ of a view": lambda host, x: host[1:].mul_(x[1:]),
    "masked_fill_": lambda host, x: host.masked_fill_(x > 1, 0),
    "out": lambda host, x: torch.add(x, x, out=host),
    "out of another size": lambda host, x: torch.cat([x, x], out=host),
    "out of a scan": lambda host, x: torch.cumsum(x, 0, out=host),
    "out on the device": lambda host, x: torch.mul(host, host, out=x),
    "a list": lambda host, x: torch._foreach_add_([host], [x]),
    "a list of both": lambda host, x: torch._foreach_mul_([host[:0], x], [x[:0], host]),
    "the device's own": lambda host, x: x.add_(host),
}


@pytest.mark.parametrize("write", REFUSED.values(), ids=REFUSED)
def test_a_write_across_devices_is_refused(write, device):
    host, x = torch.arange(3.0), torch.ones(3).to(device)
    with pytest.raises(RuntimeError, match="same device"):
        write(host, x)
    assert type(host) is torch.Tensor
    assert torch.equal(host, torch.arange(3.0))
    assert torch.equal(x.cpu(), torch.ones(3))


def test_a_copy_and_a_number_cross_devices(device):
    host, x = torch.arange(3.0), torch.ones(3).to(device)
    host[:2] = x[:2]
    host[2].fill_(x[2] + 4)
    assert torch.equal(host, torch.tensor([1.0, 1.0, 5.0]))
    assert not host.is_set_to(x)
    assert not x.is_set_to(host)
    assert type(host) is torch.Tensor


def test_lists_of_both_devices_are_written_one_by_one(device):
    host, x = torch.arange(3.0), torch.ones(3).to(device)
    torch._foreach_copy_([host, x], [x, torch.full((3,), 2.0)])
    torch._foreach_mul_([host, x], 3)
    assert torch.equal(host, torch.full((3,), 3.0))
    assert torch.equal(x.cpu(), torch.full((3,), 6.0))


def test_memory_of_the_other_device_is_refused(device):
    host, x = torch.arange(3.0), torch.ones(3).to(device)
    for one, other in ((host, x), (x, host)):
        with pytest.raises(RuntimeError, match="different device"):
            one.set_(other)


def test_lengths_of_sequences_are_asked_for_on_the_cpu(device):
    lengths = torch.tensor([2, 1]).to(device)
    with pytest.raises(RuntimeError, match="should be a 1D CPU int64 tensor, but got 1D tpu:0 Long tensor"):
        torch.nn.utils.rnn.pack_padded_sequence(torch.ones(2, 2, 1).to(device), lengths)


def test_sections_on_either_device(device):
    x = torch.arange(6.0).to(device)
    for on in ("cpu", device):
        assert [len(part) for part in torch.tensor_split(x, torch.tensor([1, 2], device=on))] == [1, 1, 4]
        with pytest.raises(RuntimeError, match="to have dtype of long, but got Float"):
            torch.tensor_split(x, torch.tensor(2.0, device=on))
