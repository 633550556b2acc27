"""Trains a small convolutional net whose forward and backward passes are whole programs: torch.compile.

python examples/compile_model.py
python examples/compile_model.py --dump graphs     # FX graphs, StableHLO, executables and weights
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

import lazytpu


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Trains a small net with torch.compile.")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--dump", metavar="DIR", default="")
    args = parser.parse_args(arguments)
    lazytpu.config.dump = args.dump

    torch.manual_seed(0)
    device = lazytpu.device()
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 64, 4)
    ).to(device)
    compiled = torch.compile(model, backend="lazytpu")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(args.steps):
        labels = torch.randint(0, 4, (32,))
        images = torch.randn(32, 1, 8, 8) * 0.3
        images[torch.arange(32), 0, 2 * labels] += 1  # a bright row
        optimizer.zero_grad()
        loss = F.cross_entropy(compiled(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        lazytpu.mark_step()
        if step % 10 == 0 or step == args.steps - 1:
            print(f"step {step:3}  loss {loss.item():.4f}")
    print(lazytpu.explain())


if __name__ == "__main__":
    main()
