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
from collections.abc import Callable

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


class Stopwatch:
    """Seconds spent in calls that may compile, run or wait for the device."""

    def __init__(self) -> None:
        self.start, self.device_s = time.perf_counter(), 0.0

    def __call__(self, call: Callable[[], object]) -> object:
        start = time.perf_counter()
        result = call()
        self.device_s += time.perf_counter() - start
        return result

    @property
    def total_s(self) -> float:
        return time.perf_counter() - self.start


def main() -> None:
    args = parse_arguments()
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
    console.print(f"{args.model} of {weights:,} weights on {device}; {args.data}: {len(train_set)} + {len(test_set)} images")
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    watch = Stopwatch()
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("training", total=steps)
        for epoch in range(1, args.epochs + 1):
            model.train()
            total_loss = torch.zeros((), device=device)
            for images, labels in train_loader:
                images, labels = images.to(device), labels.to(device)
                optimizer.zero_grad()
                loss = F.nll_loss(model(images), labels)
                loss.backward()
                optimizer.step()
                schedule.step()
                total_loss += loss.detach()  # stays on the device: reading it here would wait for every step
                watch(mark_step)
                progress.advance(bar)

            model.eval()
            test_loss, correct = torch.zeros((), device=device), torch.zeros((), dtype=torch.int64, device=device)
            with torch.no_grad():
                for images, labels in test_loader:
                    images, labels = images.to(device), labels.to(device)
                    output = model(images)
                    test_loss += F.nll_loss(output, labels, ignore_index=NO_LABEL, reduction="sum")
                    correct += (output.argmax(dim=1) == labels).sum()
                    watch(mark_step)
            mean_loss = watch(total_loss.item) / len(train_loader)
            mean_test_loss = watch(test_loss.item) / len(test_set)
            accuracy = 100 * correct.item() / len(test_set)
            progress.console.print(
                f"epoch {epoch:2}  loss {mean_loss:.4f}  test loss {mean_test_loss:.4f}  accuracy {accuracy:.2f} %"
            )
    console.print(summary(args, steps, watch))


def open_device(args: argparse.Namespace) -> tuple[torch.device, Callable[[], None]]:
    """The device and what ends a step on it."""
    if args.device == "cpu":
        return torch.device("cpu"), lambda: None
    import lazytpu

    if args.dump:
        lazytpu.config.dump = args.dump
    return lazytpu.device(), lazytpu.mark_step


def summary(args: argparse.Namespace, steps: int, watch: Stopwatch) -> str:
    """What was done and where the time went."""
    total_s = watch.total_s
    text = f"{steps} training steps in {total_s:.1f} s"
    if args.device == "cpu":
        return text
    from lazytpu import metrics

    compile_s = sum(seconds for name, (_, seconds) in metrics.timers().items() if name in ("lower", "compile"))
    text += f", {metrics.counter('compile')} compiles, {metrics.counter('cache_hit')} cache hits\n"
    text += f"recording {total_s - watch.device_s:.1f} s, compiling {compile_s:.1f} s, "
    text += f"running {max(0.0, watch.device_s - compile_s):.1f} s"
    if args.dump:
        text += f"\nthe graphs are in {args.dump}/"
    return text


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Trains a small net on handwritten digits.")
    parser.add_argument("--data", choices=["digits", "mnist", "fashion", "synthetic"], default="digits")
    parser.add_argument("--model", choices=["mlp", "cnn"], default="cnn")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3, help="highest learning rate of the one-cycle schedule")
    parser.add_argument("--device", choices=["tpu", "cpu"], default="tpu", help="cpu: plain torch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dump", metavar="DIR", default="", help="write the IR and HLO of every compiled graph there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
