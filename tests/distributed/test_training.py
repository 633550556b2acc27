"""Scripts that train in two processes: what they give on the CPU, and one program a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import lazytpu
from tests.support.ranks import matched, on_ranks

Device = torch.device
STEPS = 10


class Block(nn.Module):
    """A residual block, with a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), Block(8), nn.Linear(8, 4))


def batches(device: Device, ranks: int, place: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's part of each batch."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        x, y = torch.randn(8, 6, generator=generator), torch.randint(0, 4, (8,), generator=generator)
        part = slice(place * 8 // ranks, (place + 1) * 8 // ranks)
        yield x[part].to(device), y[part].to(device)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, device: Device, **settings: Any) -> list[torch.Tensor]:
    """Train for ten steps; return the losses, over all ranks."""
    losses = []
    for x, y in batches(device, settings.get("ranks", dist.get_world_size()), settings.get("place", dist.get_rank())):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        if settings.get("clip"):
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total)
        if device.type != "cpu":
            lazytpu.mark_step()
    return losses


def one_program_a_step(run: Callable[[Device], Any], programs: int, settled: int = 3) -> None:
    """Compare with the CPU; the steps after the first few compile nothing, cut once and run one program each."""
    counts: list[tuple[int, int, int]] = []

    mark = lazytpu.mark_step

    def counted(*args: Any) -> None:
        mark(*args)
        counter = lazytpu.metrics.counter
        counts.append((counter("compile"), counter("cut"), counter("execute")))

    lazytpu.mark_step = counted
    try:
        matched(run, atol=2e-5, rtol=2e-4)
    finally:
        lazytpu.mark_step = mark
    compiled = [after[0] for after in counts]
    assert compiled[-1] == compiled[settled - 1], f"programs after each step: {compiled}\n{lazytpu.explain()}"
    assert compiled[-1] <= programs, f"{compiled}\n{lazytpu.explain()}"
    assert counts[-1][1] - counts[settled - 1][1] == STEPS - settled, counts
    assert counts[-1][2] - counts[settled - 1][2] == STEPS - settled, counts


def results(net: nn.Module, losses: list[torch.Tensor]) -> Any:
    return losses, [p.detach() for p in net.parameters()], [p.grad for p in net.parameters()], [*net.buffers()]


@on_ranks(2)
def test_ddp() -> None:
    def run(device: Device) -> Any:
        net = DistributedDataParallel(model().to(device))
        optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
        return results(net, train(net, optimizer, device, clip=True))

    one_program_a_step(run, 3)


@on_ranks(2, alone=True)
def test_ddp_with_views_of_buckets_buffers_and_frozen_parameters() -> None:
    def run(device: Device) -> Any:
        plain = nn.Sequential(model(), nn.BatchNorm1d(4)).to(device)
        plain[0][2].requires_grad_(False)
        net = DistributedDataParallel(plain, gradient_as_bucket_view=True, find_unused_parameters=False)
        optimizer = torch.optim.SGD(net.parameters(), 1e-2, momentum=0.9)
        return results(plain, train(net, optimizer, device))

    one_program_a_step(run, 3, settled=4)


@on_ranks(2)
def test_fsdp() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def run(device: Device) -> Any:
        net, mesh = model().to(device), init_device_mesh(device.type, (2,))
        fully_shard(net[1], mesh=mesh)
        fully_shard(net, mesh=mesh)
        optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
        losses = train(net, optimizer, device)
        whole = [p.full_tensor().detach() for p in net.parameters()]
        return losses, [p.to_local().detach() for p in net.parameters()], whole

    one_program_a_step(run, 3)


@on_ranks(2)
def test_a_state_that_was_taken_before_the_first_step_follows_it() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    def run(device: Device) -> Any:
        torch.manual_seed(2)
        net = fully_shard(nn.Linear(3, 3, bias=False).to(device), mesh=init_device_mesh(device.type, (2,)))
        state = net.state_dict()
        net(torch.ones(1, 3, device=device)).sum().backward()
        torch.optim.SGD(net.parameters(), 0.1).step()
        assert torch.equal(state["weight"].to_local(), net.weight.to_local())
        return state["weight"].to_local()

    matched(run)


@on_ranks(2)
def test_tensor_parallel() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def run(device: Device) -> Any:
        net, mesh = model().to(device), init_device_mesh(device.type, (2,))
        parallelize_module(net[1], mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        optimizer = torch.optim.SGD(net.parameters(), 1e-2, momentum=0.9, foreach=False)
        losses = train(net, optimizer, device, ranks=1, place=0)
        return losses, [p.to_local() if hasattr(p, "to_local") else p for p in net.parameters()]

    one_program_a_step(run, 3)


@on_ranks(4, alone=True)
def test_fsdp_by_tensor_parallel() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def run(device: Device) -> Any:
        mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("data", "model"))
        net = model().to(device)
        parallelize_module(net[1], mesh["model"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(net[1], mesh=mesh["data"])
        fully_shard(net, mesh=mesh["data"])
        optimizer = torch.optim.SGD(net.parameters(), 1e-2, momentum=0.9, foreach=False)
        losses = train(net, optimizer, device, ranks=2, place=mesh.get_local_rank("data"))
        return losses, [p.to_local() for p in net.parameters()]

    one_program_a_step(run, 3)
