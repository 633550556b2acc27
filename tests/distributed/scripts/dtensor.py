"""DTensor and tensor parallelism; objects, sub-groups, and what goes from one rank to another."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    empty,
    full,
    ones,
    randn,
    zeros,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F

from tests.distributed.scripts.training import STEPS, Device, contents, end_step, model, script, train


def mesh_of(device: Device) -> Any:
    return init_device_mesh(device.type, (dist.get_world_size(),))


def numbers(device: Device, *size: int) -> torch.Tensor:
    torch.manual_seed(3)
    return torch.randn(size).to(device)


@script("DTensor: distribute_tensor, redistribute, full_tensor")
def redistributed(device: Device) -> Any:
    mesh, found = mesh_of(device), []
    for size in ((4, 6), (5, 3), (1, 7)):
        x = numbers(device, *size)
        for start in (Replicate(), Shard(0), Shard(1)):
            for end in (Replicate(), Shard(0), Shard(1)):
                there = distribute_tensor(x, mesh, [start]).redistribute(mesh, [end])
                found += [there.to_local(), there.full_tensor()]
        for end in (Replicate(), Shard(0), Shard(1)):
            parts = DTensor.from_local(x * (dist.get_rank() + 1), mesh, [Partial()])
            found += [parts.redistribute(mesh, [end]).to_local(), parts.full_tensor()]
    return found


@script("DTensor: operators and their gradients")
def operators(device: Device) -> Any:
    mesh, found = mesh_of(device), []
    for first, second in (([Shard(0)], [Replicate()]), ([Shard(1)], [Shard(0)]), ([Replicate()], [Shard(1)])):
        a = distribute_tensor(numbers(device, 4, 6), mesh, first).requires_grad_()
        b = distribute_tensor(numbers(device, 6, 4), mesh, second).requires_grad_()
        c = (a @ b).softmax(-1) + a.sum(1, keepdim=True).exp().mean()
        d = (torch.cat([c, c.t()]) / 10).tanh().cumsum(0)
        d.pow(2).sum().backward()
        found += [d.full_tensor(), a.grad.full_tensor(), b.grad.full_tensor(), d.argmax(-1).full_tensor()]
    return found


@script("DTensor: factories and from_local of uneven parts")
def factories(device: Device) -> Any:
    mesh = mesh_of(device)
    made = [f((5, 3), device_mesh=mesh, placements=[Shard(0)]) for f in (ones, zeros)]
    made.append(full((3, 5), 2.5, device_mesh=mesh, placements=[Shard(1)]))
    shape = empty((7, 2), device_mesh=mesh, placements=[Shard(0)]).to_local().shape
    rows = numbers(device, 3, 2)[: 3 - dist.get_rank()]
    own = DTensor.from_local(rows, mesh, [Shard(0)], shape=torch.Size([5, 2]), stride=(2, 1))
    return [x.full_tensor() for x in (*made, own)], list(shape)


@script("DTensor: random numbers, of a seed, others in each shard")
def random(device: Device) -> Any:
    if device.type == "cpu":  # torch has it for accelerators only
        return [True] * 9
    mesh, found = mesh_of(device), []
    for placement in (Shard(0), Shard(1), Replicate()):
        made = []
        for _ in range(2):
            torch.manual_seed(7)
            x = randn((4, 6), device_mesh=mesh, placements=[placement])
            y = F.dropout(distribute_tensor(torch.ones(4, 6, device=device), mesh, [placement]), 0.5)
            made.append([z.full_tensor().cpu() for z in (x, y)])
            locals_ = [torch.empty_like(x.to_local()) for _ in range(mesh.size())]
            dist.all_gather(locals_, x.to_local())
        again = all(torch.equal(a, b) for a, b in zip(*made, strict=True))
        equal = torch.equal(locals_[0].cpu(), locals_[1].cpu())
        spread = 0.5 < x.full_tensor().std().item() < 2 and {*made[0][1].unique().tolist()} == {0.0, 2.0}
        found += [again, equal == placement.is_replicate(), spread]
    return found


@script("DTensor: state_dict, distribute_module")
def modules(device: Device) -> Any:
    mesh = mesh_of(device)

    def split(name: str, module: nn.Module, mesh: Any) -> None:
        for key, p in [*module.named_parameters(recurse=False)]:
            module.register_parameter(key, nn.Parameter(distribute_tensor(p, mesh, [Shard(0)])))

    net = distribute_module(model().to(device), mesh, split, lambda m, i, d: (DTensor.from_local(i[0], d, [Shard(0)]),))

    def loss_of(out: Any, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out, DTensor.from_local(y, mesh, [Shard(0)])).full_tensor()

    found = train(net, device, torch.optim.SGD(net.parameters(), 1e-2), loss_of=loss_of)
    return found[:STEPS], [x.full_tensor() for x in net.state_dict().values()]


PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


@script("TP: columns and rows")
def columns_and_rows(device: Device) -> Any:
    net, mesh = model().to(device), mesh_of(device)
    for block in (net[1], net[2]):
        parallelize_module(block, mesh, PLAN)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2, foreach=False)
    return train(net, device, optimizer, ranks=1), contents(net)


@script("TP: sequence parallel, and a loss of parts")
def sequences(device: Device) -> Any:
    net, mesh = model().to(device), mesh_of(device)
    for block in (net[1], net[2]):
        plan = {
            "norm": SequenceParallel(sequence_dim=0),
            "up": ColwiseParallel(input_layouts=Shard(0)),
            "down": RowwiseParallel(output_layouts=Shard(0)),
        }
        parallelize_module(block, mesh, plan)
    parallelize_module(
        net,
        mesh,
        {
            "0": ColwiseParallel(output_layouts=Shard(0)),
            "3": ColwiseParallel(input_layouts=Shard(0), use_local_output=False),
        },
    )
    optimizer = torch.optim.SGD(net.parameters(), 1e-2, foreach=False)

    def loss_of(out: Any, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out, y).full_tensor()

    with loss_parallel():
        return train(net, device, optimizer, ranks=1, loss_of=loss_of), contents(net)


@script("FSDP2 x TP (4)")
def two_dimensions(device: Device) -> Any:
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("data", "model"))
    net = model().to(device)
    for block in (net[1], net[2]):
        parallelize_module(block, mesh["model"], PLAN)
        fully_shard(block, mesh=mesh["data"])
    fully_shard(net, mesh=mesh["data"])
    optimizer = torch.optim.SGD(net.parameters(), 1e-2, foreach=False)
    return train(net, device, optimizer, ranks=2, place=mesh.get_local_rank("data")), contents(net)


@script("Objects: gathered, broadcast, scattered, sent")
def objects(device: Device) -> Any:
    rank, n = dist.get_rank(), dist.get_world_size()
    every: list[Any] = [None] * n
    dist.all_gather_object(every, {"rank": rank, "x": [1.5] * rank})
    sent = [{"a": rank}, "b" * rank]
    dist.broadcast_object_list(sent, src=1)
    got: list[Any] = [None]
    dist.scatter_object_list(got, [f"for {i}" for i in range(n)] if rank == 0 else None, src=0)
    at_one = [None] * n if rank == 1 else None
    dist.gather_object(rank * 10, at_one, dst=1)
    passed: list[Any] = [("hello", rank)]
    dist.send_object_list(passed, 1) if rank == 0 else dist.recv_object_list(passed, 0)
    tensors = [torch.full((2,), float(rank), device=device)]
    dist.broadcast_object_list(tensors, src=1, device=device)
    return every, sent, got, at_one or [], passed, tensors


@script("Point to point: send, recv, isend, irecv, batch_isend_irecv in a ring")
def ring(device: Device) -> Any:
    rank, n = dist.get_rank(), dist.get_world_size()
    x, found = numbers(device, 3) * (rank + 1), []
    for _ in range(4):
        got = torch.empty_like(x)
        ops = [dist.P2POp(dist.isend, x, (rank + 1) % n), dist.P2POp(dist.irecv, got, (rank - 1) % n)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        x = got * 2
        found.append(x)
        end_step(device)
    y = torch.zeros(3, device=device)
    if rank == 0:
        dist.send(x, 1)
        dist.isend(x + 1, 1).wait()
    elif rank == 1:
        dist.recv(y, 0)
        z = torch.zeros(3, device=device)
        dist.irecv(z, 0).wait()
        y = y + z
    return found, y


@script("Groups: one for each rank, reversed ranks, new_subgroups")
def groups(device: Device) -> Any:
    rank, n = dist.get_rank(), dist.get_world_size()
    x = numbers(device, n, 2) * (rank + 1)
    own = [dist.new_group([i]) for i in range(n)][rank]
    backwards = dist.new_group(list(reversed(range(n))))
    small, _ = dist.new_subgroups(max(n // 2, 1))
    found = []
    for group in (own, backwards, small):
        y = x.clone()
        dist.all_reduce(y, group=group)
        parts = [torch.zeros_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x, group=group)
        found += [y, *parts]
    for group in {own, backwards, small} - {dist.group.WORLD}:
        dist.destroy_process_group(group)
    return found


@script("Groups: only some ranks (4)")
def some_ranks(device: Device) -> Any:
    rank = dist.get_rank()
    first, second = dist.new_group([0, 1, 3]), dist.new_group([2, 3])
    x = numbers(device, 3) * (rank + 1)
    for _ in range(3):
        if rank != 2:
            dist.all_reduce(x, group=first)
        if rank >= 2:
            dist.broadcast(x, 2, group=second)
        x = x / 4
        dist.all_reduce(x)
        end_step(device)
    return x


class Uneven(nn.Module):
    """Layers whose sizes do not divide."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.out = nn.Linear(6, 9), nn.Linear(9, 6), nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x + self.down(self.up(x).relu()))


def uneven_parts(device: Device) -> tuple[nn.Module, torch.optim.Optimizer]:
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("data", "model"))
    net = Uneven().to(device)
    plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
    fully_shard(parallelize_module(net, mesh["model"], plan), mesh=mesh["data"])
    return net, torch.optim.AdamW(net.parameters(), 1e-2, foreach=False)


@script("FSDP2 x TP: uneven parts, full_tensor read by one rank, whole states saved and loaded (4)")
def states_of_two_dimensions(device: Device) -> Any:
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    of_first = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    net, optimizer = uneven_parts(device)
    x = numbers(device, 4, 6)
    net(x).pow(2).mean().backward()
    optimizer.step()
    state, of_optimizer = (
        get_model_state_dict(net, options=whole),
        get_optimizer_state_dict(net, optimizer, options=whole),
    )
    other, its = uneven_parts(device)
    set_model_state_dict(other, state, options=of_first)
    set_optimizer_state_dict(other, its, of_optimizer, options=of_first)
    other(x).pow(2).mean().backward()
    its.step()
    read = []
    for p in other.parameters():
        full = p.full_tensor()
        if dist.get_rank() == 0:
            read.append(full.tolist())
    return [p.full_tensor() for p in other.parameters()], [round(v, 3) for v in read[-1]] if read else []
