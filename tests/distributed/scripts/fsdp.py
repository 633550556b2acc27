"""Fully sharded models: FSDP2 with its options, FSDP1 as far as scripts still have it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullStateDictConfig,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from tests.distributed.scripts.training import Block, Device, contents, model, script, train


def sharded(device: Device, net: nn.Module | None = None, mesh: Any = None, **options: Any) -> Any:
    """Return a model with each block, and the rest, sharded."""
    net = (net or model()).to(device)
    mesh = mesh or init_device_mesh(device.type, (dist.get_world_size(),))
    for block in net:
        if isinstance(block, Block):
            fully_shard(block, mesh=mesh, **options)
    return fully_shard(net, mesh=mesh, **options)


def whole(net: nn.Module) -> list[torch.Tensor]:
    return [p.full_tensor().detach() for p in net.parameters()]


def trained(device: Device, net: Any = None, **options: Any) -> Any:
    net = sharded(device, net, **options)
    return train(net, device), contents(net), whole(net)


@script("FSDP2")
def plain(device: Device) -> Any:
    return trained(device)


@script("FSDP2: MixedPrecisionPolicy(bfloat16, float32)", rtol=2e-2)
def mixed(device: Device) -> Any:
    net = sharded(device, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    return train(net, device, torch.optim.SGD(net.parameters(), 1e-2)), contents(net)


@script("FSDP2: MixedPrecisionPolicy with output_dtype", rtol=2e-2)
def mixed_outputs(device: Device) -> Any:
    net, mesh = model().to(device), init_device_mesh(device.type, (dist.get_world_size(),))
    fully_shard(net[1], mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    fully_shard(net, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32))
    return train(net, device, torch.optim.SGD(net.parameters(), 1e-2)), contents(net)


@script("FSDP2: a model that is on the CPU until it is sharded")
def from_host(device: Device) -> Any:
    net = sharded(torch.device("cpu"), mesh=init_device_mesh(device.type, (dist.get_world_size(),)))
    return train(net, device), contents(net)


@script("FSDP2: reshard_after_forward=False")
def kept(device: Device) -> Any:
    return trained(device, reshard_after_forward=False)


@script("FSDP2: prefetching set by hand")
def prefetched(device: Device) -> Any:
    net = sharded(device)
    net.set_modules_to_forward_prefetch([net[1]])
    net[1].set_modules_to_forward_prefetch([net[2]])
    net[2].set_modules_to_backward_prefetch([net[1]])
    return train(net, device), contents(net)


@script("FSDP2: unshard(async_op=True), reshard()")
def unsharded(device: Device) -> Any:
    net = sharded(device)

    def before(last: bool) -> None:
        net.unshard(async_op=True)

    found = train(net, device, between=before), contents(net)
    net.unshard()
    full = [p.detach().clone() for p in net.parameters()]
    net.reshard()
    return found, full


@script("FSDP2: CPUOffloadPolicy")
def offloaded(device: Device) -> Any:
    policy = CPUOffloadPolicy() if device.type != "cpu" else OffloadPolicy()
    net = sharded(device, offload_policy=policy)
    found = train(net, device, torch.optim.SGD(net.parameters(), 1e-2))
    return [x.to(device) for x in (*found, *contents(net))]


@script("FSDP2: set_requires_gradient_sync, two batches a step")
def accumulated(device: Device) -> Any:
    net = sharded(device)
    return train(net, device, every=2, between=net.set_requires_gradient_sync), contents(net)


@script("FSDP2: set_requires_gradient_sync and set_is_last_backward, kept parameters")
def accumulated_kept(device: Device) -> Any:
    net = sharded(device)

    def before(last: bool) -> None:
        net.set_is_last_backward(last)
        net.set_requires_gradient_sync(last)
        net.set_reshard_after_backward(last)

    return train(net, device, every=2, between=before), contents(net)


@script("FSDP2: ignored_params")
def ignored(device: Device) -> Any:
    net = model().to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    left = {net[1].norm.weight, net[1].norm.bias}
    fully_shard(net[1], mesh=mesh, ignored_params=left)
    fully_shard(net, mesh=mesh, ignored_params=left)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2, foreach=False)  # torch has no foreach of DTensors and others
    return train(net, device, optimizer), contents(net)


@script("FSDP2: uneven sizes")
def uneven(device: Device) -> Any:
    return trained(device, model(5, 7))


@script("FSDP2: sizes that leave some ranks nothing")
def empty(device: Device) -> Any:
    net = nn.Sequential(model(5, 1), nn.Linear(4, 1), nn.Linear(1, 4))
    return trained(device, net)


@script("FSDP2: shard_placement_fn, dimension 1")
def placed(device: Device) -> Any:
    return trained(device, shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 and p.shape[1] % 2 == 0 else None)


@script("FSDP2: clipped gradients")
def clipped(device: Device) -> Any:
    net = sharded(device)
    return train(net, device, clip=0.1), contents(net)


@script("FSDP2: checkpointed blocks")
def checkpointed(device: Device) -> Any:
    class Checkpointed(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    torch.manual_seed(0)
    return trained(device, nn.Sequential(nn.Linear(6, 8), Checkpointed(8), Checkpointed(8), nn.Linear(8, 4)))


@script("FSDP2: frozen layers")
def frozen(device: Device) -> Any:
    net = model()
    net[1].requires_grad_(False)
    net = sharded(device, net)
    return train(net, device), contents(net)


@script("FSDP2: made on meta, to_empty, state of all ranks loaded and saved")
def from_meta(device: Device) -> Any:
    state = model().state_dict()
    with torch.device("meta"):
        net = model()
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in (net[1], net[2], net):
        fully_shard(block, mesh=mesh)
    net.to_empty(device=device)
    set_model_state_dict(
        net,
        state if dist.get_rank() == 0 else {},
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    losses = train(net, device, optimizer)
    found, states = get_state_dict(net, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    moments = [s["exp_avg"] for s in states.get("state", {}).values()]
    return losses, contents(net), [x.to(device) for x in (*found.values(), *moments)]


@script("HSDP (4)")
def hybrid(device: Device) -> Any:
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("replicas", "shards"))
    return trained(device, mesh=mesh)


@script("FSDP2: reshard_after_forward=2 (4)")
def resharded(device: Device) -> Any:
    return trained(device, reshard_after_forward=2)


def first_version(device: Device, **options: Any) -> Any:
    net = FullyShardedDataParallel(
        model().to(device),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=options.pop("use_orig_params", True),
        device_id=device,
        **options,
    )
    losses = train(net, device)
    with FullyShardedDataParallel.summon_full_params(net):
        full = [p.detach().clone() for p in net.parameters()]
    on_cpu = FullStateDictConfig(offload_to_cpu=device.type != "cpu", rank0_only=True)
    with FullyShardedDataParallel.state_dict_type(net, StateDictType.FULL_STATE_DICT, on_cpu):
        state = net.state_dict()
    assert all(x.device.type == "cpu" for x in state.values()) and bool(state) == (dist.get_rank() == 0)
    return losses, full, [x.to(device) for x in state.values()]


@script("FSDP1")
def fsdp1(device: Device) -> Any:
    return first_version(device)


@script("FSDP1: use_orig_params=False, SHARD_GRAD_OP")
def fsdp1_flat(device: Device) -> Any:
    return first_version(device, use_orig_params=False, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
