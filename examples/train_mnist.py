"""Trains the convolutional net of PyTorch's MNIST example on handwritten digits.

    python examples/train_mnist.py                        # scikit-learn's digits, enlarged to 28x28
    python examples/train_mnist.py --device cpu           # the same on plain torch, to compare
    python examples/train_mnist.py --data fashion         # needs torchvision, downloads the set
    python examples/train_mnist.py --dump graphs          # IR, StableHLO and HLO of every compiled graph

Only three lines know of the lazy device: the one that picks it and the two calls of ``mark_step``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

NO_LABEL = -1  # of the rows that fill up the last batch of a test set


class CNN(nn.Module):
    """Two convolutions, two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3)
        self.conv2 = nn.Conv2d(32, 64, 3)
        self.dropout1 = nn.Dropout(0.25)
        self.dropout2 = nn.Dropout(0.5)
        self.fc1 = nn.Linear(64 * 12 * 12, 128)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.conv1(x))
        x = F.relu(self.conv2(x))
        x = self.dropout1(F.max_pool2d(x, 2))
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc2(self.dropout2(x)), dim=1)


class MLP(nn.Module):
    """Three linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(28 * 28, 256)
        self.fc2 = nn.Linear(256, 128)
        self.fc3 = nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.fc1(torch.flatten(x, 1)))
        return F.log_softmax(self.fc3(F.relu(self.fc2(x))), dim=1)


# --- data ----------------------------------------------------------------------------------------------


def load_data(name: str) -> tuple[TensorDataset, TensorDataset]:
    """Training and test set: images f32[n,1,28,28] of mean 0 and deviation 1, labels i64[n]."""
    if name == "digits":
        (x, y), (test_x, test_y) = digits()
    elif name == "synthetic":
        (x, y), (test_x, test_y) = synthetic(1024), synthetic(256)
    else:
        (x, y), (test_x, test_y) = from_torchvision(name)
    mean, deviation = x.mean(), x.std()
    return TensorDataset((x - mean) / deviation, y), TensorDataset((test_x - mean) / deviation, test_y)


Images = tuple[torch.Tensor, torch.Tensor]


def digits() -> tuple[Images, Images]:
    """The 1,797 handwritten digits that scikit-learn ships, every fifth of them for the test."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x = torch.tensor(bunch.images, dtype=torch.float32)[:, None] / 16
    x = F.interpolate(x, size=(28, 28), mode="bilinear", align_corners=False)
    y = torch.tensor(bunch.target, dtype=torch.int64)
    test = torch.arange(len(y)) % 5 == 0
    return (x[~test], y[~test]), (x[test], y[test])


def synthetic(count: int) -> Images:
    """A bright bar on noise; its row is the label."""
    y = torch.randint(0, 10, (count,))
    x = torch.rand(count, 1, 28, 28) * 0.5
    rows = 4 + 2 * y
    x[torch.arange(count), 0, rows] += 1
    return x, y


def from_torchvision(name: str) -> tuple[Images, Images]:
    """MNIST or Fashion-MNIST, downloaded into ``data/``."""
    try:
        from torchvision import datasets
    except ImportError:
        raise SystemExit(
            f"--data {name} needs torchvision, which is not installed.\n"
            "Install the torchvision that belongs to your torch, or use --data digits, which needs no download."
        ) from None
    kind = {"mnist": datasets.MNIST, "fashion": datasets.FashionMNIST}[name]
    parts = [kind("data", train=train, download=True) for train in (True, False)]
    train, test = [(part.data[:, None].float() / 255, part.targets) for part in parts]
    return train, test


def padded(batch_size: int) -> Callable[[list[Images]], Images]:
    """Puts examples together to a batch that always has ``batch_size`` rows.

    A last batch of another size would be another graph, and that would be compiled for itself.
    """

    def collate(examples: list[Images]) -> Images:
        x, y = torch.stack([x for x, _ in examples]), torch.stack([y for _, y in examples])
        missing = batch_size - len(y)
        return F.pad(x, (0, 0, 0, 0, 0, 0, 0, missing)), F.pad(y, (0, missing), value=NO_LABEL)

    return collate


# --- training ------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse_arguments(arguments)
    console = Console(highlight=False)
    torch.manual_seed(args.seed)
    device, mark_step = open_device(args)

    train_set, test_set = load_data(args.data)
    train_loader = DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True)
    test_loader = DataLoader(test_set, args.batch_size, collate_fn=padded(args.batch_size))
    model = {"cnn": CNN, "mlp": MLP}[args.model]().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    steps = args.epochs * len(train_loader)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=args.lr, total_steps=steps)

    weights = sum(p.numel() for p in model.parameters())
    images = f"{len(train_set):,} images and {len(test_set):,} for the test"
    console.print(f"{args.model} of {weights:,} weights on {device}; {args.data}: {images}")
    start = time.perf_counter()
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("training", total=steps)
        for epoch in range(1, args.epochs + 1):
            losses = []
            model.train()
            for x, y in train_loader:
                x, y = x.to(device), y.to(device)
                optimizer.zero_grad()
                loss = F.nll_loss(model(x), y)
                loss.backward()
                optimizer.step()
                schedule.step()
                losses.append(loss.detach())  # read at the end of the epoch: reading waits for the device
                mark_step()
                progress.advance(bar)
            test_loss, accuracy = evaluate(model, test_loader, device, mark_step)
            progress.console.print(
                f"epoch {epoch:2}  loss {torch.stack(losses).mean():.4f}  "
                f"test loss {test_loss:.4f}  test accuracy {accuracy:.2%}"
            )
    console.print(summary(args, steps, time.perf_counter() - start, mark_step))


@torch.no_grad()
def evaluate(
    model: nn.Module, loader: DataLoader[Images], device: torch.device, mark_step: Callable[[], None]
) -> tuple[float, float]:
    """Mean loss and share of right answers."""
    losses, hits, count = [], [], 0
    model.eval()
    for x, y in loader:
        count += int((y != NO_LABEL).sum())
        x, y = x.to(device), y.to(device)
        output = model(x)
        losses.append(F.nll_loss(output, y, ignore_index=NO_LABEL, reduction="sum"))
        hits.append((output.argmax(dim=1) == y).sum())
        mark_step()
    return torch.stack(losses).sum().item() / count, torch.stack(hits).sum().item() / count


class Timed:
    """A function that adds up the seconds spent in it."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.function, self.seconds = function, 0.0

    def __call__(self) -> None:
        start = time.perf_counter()
        self.function()
        self.seconds += time.perf_counter() - start


def open_device(args: argparse.Namespace) -> tuple[torch.device, Timed]:
    """The device, and what to call at the end of every step on it."""
    if args.device == "cpu":
        return torch.device("cpu"), Timed(lambda: None)
    import lazytpu

    if args.dump:
        lazytpu.config.dump = args.dump
    return lazytpu.device(), Timed(lazytpu.mark_step)


def summary(args: argparse.Namespace, steps: int, total_s: float, mark_step: Timed) -> str:
    """What was done and where the time went."""
    text = f"{steps} training steps in {total_s:.1f} s"
    if args.device == "cpu":
        return text
    from lazytpu.observe import metrics

    seconds = {name: total for name, (_, total) in metrics.timers().items()}
    compile_s = seconds.get("lower", 0.0) + seconds.get("compile", 0.0)
    run_s = max(0.0, mark_step.seconds + seconds.get("wait", 0.0) - compile_s)
    text += f", {metrics.counter('compile')} compiles, {metrics.counter('cache_hit')} cache hits\n"
    text += f"compiling {compile_s:.1f} s, running {run_s:.1f} s, recording {max(0, total_s - compile_s - run_s):.1f} s"
    return text + (f"\nthe graphs are in {args.dump}" if args.dump else "")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a small net on handwritten digits.")
    parser.add_argument("--data", choices=["digits", "mnist", "fashion", "synthetic"], default="digits")
    parser.add_argument("--model", choices=["mlp", "cnn"], default="cnn")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3, help="highest learning rate of the one-cycle schedule")
    parser.add_argument("--device", choices=["tpu", "cpu"], default="tpu", help="cpu: plain torch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dump", metavar="DIR", default="", help="write the IR and HLO of every compiled graph there")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
