"""Train a small GPT on a mesh of devices: with the batch, the parameters or the layers split.

    python examples/train_gpt_spmd.py --how data      # each device has the model and a part of the batch
    python examples/train_gpt_spmd.py --how fully     # and only a part of each parameter
    python examples/train_gpt_spmd.py --how layers    # 2 x 4: parts of the batch, and parts of each layer

It uses all devices of the machine.  On a CPU these are eight virtual ones.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Sequence

if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):  # read when jax starts
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import torch
import torch.nn.functional as F
from torch import nn

import lazytpu
from lazytpu import spmd


class Block(nn.Module):
    """Attention and a feed-forward net, each behind a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A language model over bytes."""

    def __init__(self, length: int, width: int, heads: int, blocks: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[Block(width, heads) for _ in range(blocks)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(h)))


def batches(steps: int, size: int, length: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield pieces of this file, and the bytes that follow theirs."""
    with open(__file__, "rb") as file:
        text = torch.tensor(list(file.read()))
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        starts = torch.randint(len(text) - length - 1, (size,), generator=generator)
        piece = torch.stack([text[s : s + length + 1] for s in starts])
        yield piece[:, :-1], piece[:, 1:]


def spread(model: GPT, how: str) -> tuple[spmd.Mesh, str]:
    """Split the model; return the mesh, and the axis that batches are split over."""
    count = len(spmd.Mesh((-1,), ("data",)).devices)
    if how == "layers" and count % 4 == 0:
        mesh = spmd.Mesh((count // 4, 4), ("data", "model"))
        for block in model.blocks:
            for layer in (block.q, block.k, block.v, block.up):  # by columns: each device has some of the heads
                spmd.mark_sharding(layer.weight, mesh, ("model", None))
                spmd.mark_sharding(layer.bias, mesh, ("model",))
            for layer in (block.out, block.down):  # by rows: the parts of the sum are added
                spmd.mark_sharding(layer.weight, mesh, (None, "model"))
        return mesh, "data"
    mesh = spmd.Mesh((count,), ("data",))
    if how == "fully":
        spmd.fully_shard(model, mesh)
    return mesh, "data"


def main(arguments: Sequence[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--how", choices=["data", "fully", "layers"], default="fully")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=2)
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    model = GPT(64, options.width, 4, options.blocks).to(lazytpu.device())
    mesh, axis = spread(model, options.how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    print(f"{options.how}: mesh {mesh.describe()}, {sum(p.numel() for p in model.parameters()):,} parameters")
    spmd.visualize(model.blocks[0].up.weight)

    losses = []
    began = time.perf_counter()
    for x, y in lazytpu.DeviceLoader(batches(options.steps, options.batch, 64), mesh=mesh, spec=(axis,)):
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    found = [loss.item() for loss in losses]
    print(f"loss {found[0]:.3f} to {found[-1]:.3f} in {len(found)} steps, {time.perf_counter() - began:.1f} s")
    print(f"{lazytpu.metrics.counter('compile')} programs compiled")
    return found


if __name__ == "__main__":
    main()
