"""Train a small GPT with torch.distributed, the same on the device and on the CPU.

    torchrun --nproc-per-node 2 examples/train_gpt_torchrun.py --how ddp       # each process has the model
    torchrun --nproc-per-node 2 examples/train_gpt_torchrun.py --how fsdp      # and only a part of each parameter
    torchrun --nproc-per-node 4 examples/train_gpt_torchrun.py --how tp        # parts of each layer
    torchrun --nproc-per-node 4 examples/train_gpt_torchrun.py --how fsdp_tp   # parts of parts
    torchrun --nproc-per-node 2 examples/train_gpt_torchrun.py --how pp        # some of the layers

With ``--device cpu`` it is a program of torch alone, with Gloo.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import lazytpu  # the device "tpu", and its backend


class Block(nn.Module):
    """Attention and a feed-forward net, each behind a norm."""

    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.head = head
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(-1, (-1, self.head)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Start(nn.Module):
    """What the blocks get of bytes."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(length, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))


class GPT(nn.Sequential):
    """A language model over bytes."""

    def __init__(self, length: int, width: int, blocks: int) -> None:
        end = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256, bias=False))
        super().__init__(Start(length, width), *[Block(width, 16) for _ in range(blocks)], end)


def batches(steps: int, size: int, length: int, mesh: DeviceMesh) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield pieces of this file and the bytes that follow theirs: this process's part of each batch."""
    with open(__file__, "rb") as file:
        text = torch.tensor(list(file.read()))
    generator = torch.Generator().manual_seed(0)
    part = size // mesh["data"].size()
    own = slice(part * mesh.get_local_rank("data"), part * (mesh.get_local_rank("data") + 1))
    for _ in range(steps):
        starts = torch.randint(len(text) - length - 1, (size,), generator=generator)
        piece = torch.stack([text[s : s + length + 1] for s in starts])[own]
        yield piece[:, :-1], piece[:, 1:]


def spread(model: GPT, how: str, mesh: DeviceMesh) -> nn.Module:
    """Let the processes share the work."""
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    for block in list(model)[1:-1]:
        if how in ("tp", "fsdp_tp"):
            columns = dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel())
            parallelize_module(block, mesh["model"], {**columns, "out": RowwiseParallel(), "down": RowwiseParallel()})
        if how in ("fsdp", "fsdp_tp"):
            fully_shard(block, mesh=mesh["data"])
    if how in ("fsdp", "fsdp_tp"):
        fully_shard(model, mesh=mesh["data"])
    return model


def loss_of(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out.flatten(0, 1), y.flatten())


def pipelined(model: GPT, device: torch.device, parts: int) -> tuple[nn.Module, Callable[..., torch.Tensor]]:
    """Return this process's layers, and a function that computes the loss and the gradients of a batch."""
    rank, world = dist.get_rank(), dist.get_world_size()
    own = nn.Sequential(*list(model)[rank * len(model) // world : (rank + 1) * len(model) // world])
    schedule = Schedule1F1B(PipelineStage(own, rank, world, device), parts, loss_of)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = []
        last = {"target": y, "losses": losses} if rank == world - 1 else {}
        schedule.step(*([x] if rank == 0 else []), **last)
        return world * torch.stack(losses).mean() if losses else torch.zeros((), device=device)

    return own, step


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--how", choices=["ddp", "fsdp", "tp", "fsdp_tp", "pp"], default="fsdp")
    parser.add_argument("--device", default="tpu", help="tpu or cpu")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8, help="of all processes together")
    parser.add_argument("--width", type=int, default=64, help="a multiple of 16, the width of a head")
    parser.add_argument("--blocks", type=int, default=2)
    options = parser.parse_args(arguments)

    device = torch.device(options.device)
    if device.type != "cpu":
        device = torch.device(device.type, int(os.environ["LOCAL_RANK"]))
        torch.accelerator.set_device_index(device.index)
    dist.init_process_group("gloo" if device.type == "cpu" else None)
    world = dist.get_world_size()
    parts = {"tp": world, "pp": world, "fsdp_tp": 2}.get(options.how, 1)
    mesh = init_device_mesh(device.type, (world // parts, parts), mesh_dim_names=("data", "model"))

    torch.manual_seed(0)
    whole = GPT(32, options.width, options.blocks).to(device)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = loss_of(model(x), y)
        loss.backward()
        return loss

    if options.how == "pp":
        model, step = pipelined(whole, device, 4)
    else:
        model = spread(whole, options.how, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, foreach="tp" not in options.how)
    losses = []
    for x, y in batches(options.steps, options.batch, 32, mesh):
        optimizer.zero_grad()
        loss = step(x.to(device), y.to(device))
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        losses.append(total)
        lazytpu.mark_step()
    found = [total.item() / world for total in losses]
    if dist.get_rank() == 0:
        print(f"{options.how} on {world} x {device.type}: loss {found[0]:.4f} to {found[-1]:.4f}")
        print(f"{lazytpu.metrics.counter('compile')} programs compiled")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
