"""DistributedDataParallel, with its options."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer, _apply_optimizer_in_backward
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.distributed.scripts.training import (
    STEPS,
    Block,
    Device,
    batches,
    contents,
    end_step,
    model,
    script,
    train,
)


def trained(device: Device, net: nn.Module | None = None, **options: Any) -> Any:
    net = (net or model()).to(device)
    return train(DDP(net, **options), device), contents(net)


@script("DDP")
def plain(device: Device) -> Any:
    return trained(device)


@script("DDP: clipped gradients, small buckets")
def small_buckets(device: Device) -> Any:
    net = DDP(model().to(device), bucket_cap_mb=0.0005)
    return train(net, device, clip=0.1), contents(net)


@script("DDP: gradient_as_bucket_view")
def bucket_views(device: Device) -> Any:
    return trained(device, gradient_as_bucket_view=True)


@script("DDP: static_graph")
def static_graph(device: Device) -> Any:
    return trained(device, static_graph=True)


@script("DDP: static_graph, gradient_as_bucket_view, checkpointed blocks")
def checkpointed(device: Device) -> Any:
    class Checkpointed(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), Checkpointed(8), Checkpointed(8), nn.Linear(8, 4))
    return trained(device, net, static_graph=True, gradient_as_bucket_view=True)


@script("DDP: no_sync, two batches a step")
def no_sync(device: Device) -> Any:
    net = DDP(model().to(device))
    return train(net, device, every=2, between=lambda last: nullcontext() if last else net.no_sync()), contents(net)


@script("DDP: no_sync and gradient_as_bucket_view")
def no_sync_of_views(device: Device) -> Any:
    net = DDP(model().to(device), gradient_as_bucket_view=True)
    return train(net, device, every=2, between=lambda last: nullcontext() if last else net.no_sync()), contents(net)


class Branches(nn.Module):
    """Uses another one of two layers in each step, and on each rank."""

    def __init__(self, alike: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.branches, self.last = nn.Linear(6, 8), nn.ModuleList([Block(8), Block(8)]), nn.Linear(8, 4)
        self.calls, self.alike = 0, alike

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        branch = self.calls + (0 if self.alike else dist.get_rank())
        return self.last(self.branches[branch % 2](self.first(x)))


@script("DDP: find_unused_parameters, the same on all ranks")
def unused(device: Device) -> Any:
    return trained(device, Branches(True), find_unused_parameters=True)


@script("DDP: find_unused_parameters, others on each rank")
def unused_here(device: Device) -> Any:
    return trained(device, Branches(False), find_unused_parameters=True)


def hooked(device: Device, hook: Any, state: Any = None, **options: Any) -> Any:
    net = DDP(model().to(device), **options)
    net.register_comm_hook(state, hook)
    return train(net, device), contents(net)


@script("DDP: hook allreduce")
def hook_allreduce(device: Device) -> Any:
    return hooked(device, default_hooks.allreduce_hook)


@script("DDP: hook fp16_compress", rtol=2e-3)
def hook_fp16(device: Device) -> Any:
    return hooked(device, default_hooks.fp16_compress_hook, gradient_as_bucket_view=True)


@script("DDP: hook bf16_compress", rtol=2e-2)
def hook_bf16(device: Device) -> Any:
    hook = default_hooks.bf16_compress_hook  # which torch refuses by its name for Gloo
    return hooked(device, hook if device.type != "cpu" else lambda state, bucket: hook(state, bucket))


@script("DDP: hook of one's own, with then()")
def hook_own(device: Device) -> Any:
    def hook(state, bucket):  # torch compares annotations with types, and here they would be texts
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0] / dist.get_world_size())

    return hooked(device, hook)


@script("DDP: hook PowerSGD")
def hook_power(device: Device) -> Any:
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=3, min_compression_rate=1
    )
    return hooked(device, powerSGD_hook.powerSGD_hook, state)


@script("DDP: hook post-local SGD")
def local_sgd(device: Device) -> Any:
    from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    net = DDP(model().to(device))
    net.register_comm_hook(PostLocalSGDState(None, dist.new_subgroups(1)[0], 4), post_localSGD_hook)
    local = torch.optim.SGD(net.parameters(), 1e-2)
    optimizer = PostLocalSGDOptimizer(local, PeriodicModelAverager(period=3, warmup_steps=4))
    return train(net, device, optimizer), contents(net)


@script("DDP: SyncBatchNorm")
def sync_batch_norm(device: Device) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    if device.type == "cpu":  # torch has it for accelerators only: the same, from what there is for the CPU
        return _batch_norm_over_all(net)
    net = nn.SyncBatchNorm.convert_sync_batchnorm(net).to(device)
    return train(DDP(net), device, torch.optim.SGD(net.parameters(), 1e-2)), contents(net)


def _batch_norm_over_all(net: nn.Module) -> Any:
    """Train one process on whole batches: what synchronized norms give on each rank's part."""
    optimizer, losses = torch.optim.SGD(net.parameters(), 1e-2), []
    for x, y in batches(torch.device("cpu"), ranks=1):
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        losses.append(loss.detach() * dist.get_world_size())
        gradients = [p.grad.clone() for p in net.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *gradients], contents(net)


@script("DDP: buffers of BatchNorm, a frozen layer")
def buffers(device: Device) -> Any:
    net = nn.Sequential(model(), nn.BatchNorm1d(4))
    net[0][3].requires_grad_(False)
    net = DDP(net.to(device), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(net.parameters(), 1e-2, momentum=0.9)  # Adam makes noise of gradients that are zero
    return train(net, device, optimizer), contents(net)


@script("DDP: autocast to bfloat16", rtol=5e-2)
def autocast(device: Device) -> Any:
    torch.manual_seed(0)  # no norm, which has another type in the autocast of the CPU, and no Adam, which adds to noise
    net = DDP(nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 4)).to(device))
    optimizer = torch.optim.SGD(net.parameters(), 1e-2)
    with torch.autocast(device.type, torch.bfloat16):
        return train(net, device, optimizer, loss_of=lambda out, y: F.cross_entropy(out.float(), y)), contents(net)


def _train_fewer_on_later_ranks(net: DDP, optimizer: torch.optim.Optimizer, device: Device) -> None:
    for x, y in [*batches(device)][: STEPS - dist.get_rank()]:
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
        end_step(device)


@script("DDP: join() of uneven numbers of batches")
def joined(device: Device) -> Any:
    net = DDP(model().to(device))
    optimizer = torch.optim.SGD(net.parameters(), 1e-2)
    with net.join():
        _train_fewer_on_later_ranks(net, optimizer, device)
    return contents(net)


@script("ZeroRedundancyOptimizer")
def zero(device: Device) -> Any:
    net = DDP(model().to(device))
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=1e-2)
    found = train(net, device, optimizer), contents(net)
    optimizer.consolidate_state_dict(to=0)
    state = optimizer.state_dict()["state"] if dist.get_rank() == 0 else {}
    return found, [state[i]["exp_avg"].to(device) for i in sorted(state)]


@script("ZeroRedundancyOptimizer: parameters_as_bucket_view, and a Join")
def zero_of_views(device: Device) -> Any:
    net = DDP(model().to(device), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        net.parameters(), torch.optim.SGD, parameters_as_bucket_view=True, lr=1e-2, momentum=0.9
    )
    with Join([net, optimizer]):
        _train_fewer_on_later_ranks(net, optimizer, device)
    return contents(net)


@script("DDP: DistributedSampler, shuffled, of uneven length")
def sampled(device: Device) -> Any:
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(27, 6), torch.randint(0, 4, (27,)))
    sampler: DistributedSampler[Any] = DistributedSampler(data, seed=3)
    net = DDP(model().to(device))
    optimizer, losses = torch.optim.AdamW(net.parameters(), 1e-2), []
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(data, 5, sampler=sampler):
            loss = F.cross_entropy(net(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            end_step(device)
    return losses, contents(net)


@script("DDP: optimizers that step in the backward pass")
def in_backward(device: Device) -> Any:
    net = model().to(device)
    _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
    wrapped, losses = DDP(net), []
    for x, y in batches(device):
        loss = F.cross_entropy(wrapped(x), y)
        loss.backward()
        losses.append(loss.detach())
        end_step(device)
    return losses, contents(net)
