"""The models that every backend is timed on: the same weights, inputs and optimizers everywhere.

Only torch is imported, so that any environment with some torch can run them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

SGD_LR, SGD_MOMENTUM = 0.01, 0.9
ADAMW_LR, ADAMW_DECAY = 1e-4, 0.01


@dataclass(frozen=True, slots=True)
class Workload:
    """What one training step is made of.

    Attributes:
        net: gives logits [rows, classes].
        x: its input.
        target: classes, i64[rows].
        optimizer: ``sgd`` or ``adamw``.
    """

    net: nn.Module
    x: torch.Tensor
    target: torch.Tensor
    optimizer: str


class CNN(nn.Module):
    """Two convolutions and two linear layers, with dropout: the usual MNIST example."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
        self.linear1, self.linear2 = nn.Linear(9216, 128), nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool2d(F.relu(self.conv2(F.relu(self.conv1(x)))), 2)
        x = torch.flatten(F.dropout(x, 0.25, self.training), 1)
        return self.linear2(F.dropout(F.relu(self.linear1(x)), 0.5, self.training))


class Residual(nn.Module):
    """Two convolutions with batch norm, and the way around them."""

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.norm2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.around = None
        if channels != out:
            self.around = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(y + (x if self.around is None else self.around(x)))


# input channels, output channels and stride of each residual layer
RESNET18 = (
    (64, 64, 1),
    (64, 64, 1),
    (64, 128, 2),
    (128, 128, 1),
    (128, 256, 2),
    (256, 256, 1),
    (256, 512, 2),
    (512, 512, 1),
)


class ResNet18(nn.Module):
    """The network of 18 layers for images of any size."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        self.layers = nn.Sequential(*[Residual(*shape) for shape in RESNET18])
        self.head = nn.Linear(512, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.stem(x)).mean((2, 3)))


class Block(nn.Module):
    """A transformer block with causal attention, on [batch, length, width]."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm1(x)).split(width, 2)
        q, k, v = (part.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


Apply = Callable[[nn.ModuleList, torch.Tensor], torch.Tensor]


def one_after_the_other(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    """Applies blocks as a plain loop; `GPT` can be given another way."""
    for block in blocks:
        x = block(x)
    return x


class GPT(nn.Module):
    """A small language model, token numbers [batch, length] to logits [batch * length, vocabulary]."""

    def __init__(
        self,
        vocabulary: int = 5000,
        length: int = 128,
        width: int = 256,
        heads: int = 4,
        layers: int = 6,
        apply: Apply = one_after_the_other,
    ) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width, heads) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self._apply_blocks = apply

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.words(x) + self.places(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self._apply_blocks(self.blocks, y))).flatten(0, 1)


def _images(count: int, channels: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, channels, size, size), torch.randint(0, 10, (count,))


def _tokens(batch: int, length: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, vocabulary, (batch, length)), torch.randint(0, vocabulary, (batch * length,))


def _mlp() -> Workload:
    x, target = _images(64, 1, 28)
    layers = nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    return Workload(nn.Sequential(nn.Flatten(), *layers), x, target, "sgd")


def _deepmlp() -> Workload:
    thin = [layer for _ in range(100) for layer in (nn.Linear(32, 32), nn.ReLU())]
    net = nn.Sequential(nn.Linear(32, 32), *thin, nn.Linear(32, 10))
    return Workload(net, torch.randn(8, 32), torch.randint(0, 10, (8,)), "adamw")


def _cnn() -> Workload:
    x, target = _images(64, 1, 28)
    return Workload(CNN(), x, target, "sgd")


def _resnet18() -> Workload:
    x, target = _images(16, 3, 64)
    return Workload(ResNet18(), x, target, "sgd")


def _gpt() -> Workload:
    x, target = _tokens(4, 128, 5000)
    return Workload(GPT(), x, target, "adamw")


def _tiny() -> Workload:
    return Workload(
        nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(4, 8), torch.arange(4), "sgd"
    )


def _large_mlp() -> Workload:
    net = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 10))
    return Workload(net, torch.randn(256, 1024), torch.randint(0, 10, (256,)), "adamw")


def _large_resnet18() -> Workload:
    x, target = _images(64, 3, 128)
    return Workload(ResNet18(), x, target, "sgd")


def _large_gpt() -> Workload:
    x, target = _tokens(16, 128, 5000)
    return Workload(GPT(width=512, heads=8), x, target, "adamw")


# What each is there for: mlp is small steps; deepmlp is 101 thin layers, so that the host is the limit; cnn and
# resnet18 are convolutions; gpt is matrix products and attention.
SMALL: dict[str, Callable[[], Workload]] = {
    "mlp": _mlp,
    "deepmlp": _deepmlp,
    "cnn": _cnn,
    "resnet18": _resnet18,
    "gpt": _gpt,
}
# For machines with a GPU, on which those above are over before the next is started.
LARGE: dict[str, Callable[[], Workload]] = {
    "large-mlp": _large_mlp,
    "large-resnet18": _large_resnet18,
    "large-gpt": _large_gpt,
}
_ALL = {**SMALL, **LARGE, "tiny": _tiny}  # tiny is for the tests of these programs


def make(name: str) -> Workload:
    """The workload of a name, with the same numbers each time.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in _ALL:
        raise ValueError(f"unknown model {name!r}; one of {', '.join(_ALL)}")
    torch.manual_seed(0)
    return _ALL[name]()


def optimizer(kind: str, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer of a workload's kind."""
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=SGD_LR, momentum=SGD_MOMENTUM)
    return torch.optim.AdamW(parameters, lr=ADAMW_LR, weight_decay=ADAMW_DECAY)
