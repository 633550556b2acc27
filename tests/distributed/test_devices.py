"""The devices of ranks: each process has the one of its local rank."""

from __future__ import annotations

import importlib
import io
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lazytpu
from tests.support.ranks import on_ranks


@on_ranks(2)
def test_each_process_has_the_device_of_its_local_rank() -> None:
    rank = dist.get_rank()
    device = torch.device(f"tpu:{rank}")
    torch.accelerator.set_device_index(rank)
    torch.tpu.set_device(rank)
    assert torch.accelerator.device_count() == torch.tpu.device_count() == lazytpu.device_count() == 2
    x = torch.ones(3, device=device)
    assert x.device == lazytpu.device() == lazytpu.device(rank) == torch.device("tpu:0")
    assert x.to(device).tolist() == torch.ones(3).to(rank).tolist() == [1.0, 1.0, 1.0]
    leaf = x.clone().requires_grad_()
    assert leaf.to(device) is leaf and leaf.to(device, torch.float32) is leaf and x.detach().to(rank).device == x.device
    assert leaf.to(device, torch.bfloat16).dtype is torch.bfloat16 and leaf.to(device, copy=True) is not leaf
    with torch.inference_mode():
        y = x + 1
        assert y.to(device) is y
    with pytest.raises(RuntimeError, match="there are 2 devices"):
        leaf.to("tpu:5")
    x.record_stream(torch.accelerator.current_stream())
    with torch.tpu.device(rank):
        assert (x + 1).device == x.device
    with pytest.raises(RuntimeError, match="this process is local rank . and has tpu:.; there are 2 devices"):
        torch.ones(2, device="tpu:5")
    if rank == 0:
        with pytest.raises(RuntimeError, match="this process is local rank 0 and has tpu:0; local rank 1 has tpu:1"):
            torch.tpu.set_device(1)


@on_ranks(2)
def test_modules_on_a_ranks_device() -> None:
    rank = dist.get_rank()
    net = nn.Linear(3, 3).to(rank)
    assert net.weight.device == lazytpu.device()
    ddp = nn.parallel.DistributedDataParallel(net, device_ids=[rank])
    ddp(torch.ones(2, 3)).sum().backward()
    assert net.weight.grad.device == net.weight.device
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, map_location={"tpu:0": f"tpu:{rank}"})
    assert torch.equal(loaded["weight"].cpu(), net.weight.cpu())
    dist.barrier(device_ids=[rank])


@pytest.fixture
def no_group() -> Iterator[None]:
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("backend", [None, "lazytpu", "cpu:gloo,tpu:lazytpu", "xla"])
def test_each_name_of_the_backend(device: torch.device, no_group: None, backend: str | None) -> None:
    """In a world of one; the names work in others alike."""
    if backend == "xla":
        importlib.import_module("lazytpu.compat.torch_xla.distributed.xla_backend")
    dist.init_process_group(backend, rank=0, world_size=1, store=dist.HashStore())
    x, host = torch.ones(2, device=device), torch.ones(2)
    for tensor in (x, host):
        dist.all_reduce(tensor)
        dist.broadcast(tensor, 0)
    gathered = [torch.zeros(2, device=device)]
    dist.all_gather(gathered, x * 3)
    assert x.tolist() == host.tolist() == [1.0, 1.0]
    assert gathered[0].tolist() == [3.0, 3.0]
