"""Train a convolutional network on handwritten digits:  python -m lazytpu run train.py 10

A plain PyTorch script.  What it says to lazytpu is the device, and where a step ends.
"""

from __future__ import annotations

import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

import lazytpu


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.head = nn.Linear(32 * 4 * 4, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        logits: torch.Tensor = self.head(F.dropout(x.flatten(1), 0.2, self.training))
        return logits


def digits() -> tuple[str, torch.Tensor, torch.Tensor]:
    """Return a name, images f32[n,1,8,8] from 0 to 1 and their labels i64[n]."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:  # a bright bar on noise; its row is the label
        y = torch.randint(0, 8, (1800,))
        x = torch.rand(1800, 1, 8, 8) * 0.6
        x[torch.arange(1800), 0, y] += 0.4
        return "drawn bars", x, y
    bunch = load_digits()
    return "scikit-learn's digits", torch.tensor(bunch.images).float()[:, None] / 16, torch.tensor(bunch.target)


def main(seconds: float) -> None:
    torch.manual_seed(0)
    device = lazytpu.device()
    name, images, labels = digits()
    x, y = images[:1500].to(device), labels[:1500].to(device)
    test_x, test_y = images[1500:].to(device), labels[1500:].to(device)
    model = Net().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    print(f"{name} on {device}: {len(x)} for training, {len(test_x)} for the test")

    begun = start = time.monotonic()
    epoch, steps, shown = 0, 0, ""
    while epoch == 0 or time.monotonic() - start < seconds:
        losses = []
        model.train()
        for rows in torch.randperm(len(x)).split(128):  # the last batch is smaller: a graph of its own
            batch = rows.to(device)
            loss = F.cross_entropy(model(x[batch]), y[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            lazytpu.mark_step()
            losses.append(loss.detach())  # read when the epoch has ended: reading waits for the device
            steps += 1
        model.eval()
        with torch.no_grad():
            right = (model(test_x).argmax(1) == test_y).float().mean()
        epoch += 1
        shown = f"epoch {epoch:3}  loss {torch.stack(losses).mean().item():.4f}  test accuracy {right.item():.1%}\n"
        if epoch & (epoch - 1) == 0:  # 1, 2, 4, 8, ...
            print(shown, end="")
            shown = ""
        if epoch == 1:
            start, steps = time.monotonic(), 0
            print(f"{start - begun:.1f} s so far, in which all graphs were compiled")
    print(f"{shown}{steps} more steps in {time.monotonic() - start:.1f} s")


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 10.0)
