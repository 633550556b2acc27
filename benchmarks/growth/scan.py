"""With scan_layers the time to compile does not grow with the number of layers."""

from __future__ import annotations

import time

import torch
import torch.nn.functional as F
from torch import nn

import lazytpu
from benchmarks.growth.study import Points, Study, Verdict
from benchmarks.models import GPT, Apply, one_after_the_other

DEPTHS = (6, 12, 24, 48)
_LOOP_DEPTHS = (6, 12)  # a plain loop is compiled for these only: it takes long
_WIDTH, _LENGTH, _VOCABULARY = 64, 32, 500
_LIMIT = 1.5


def study(depths: tuple[int, ...] = DEPTHS, loop_depths: tuple[int, ...] = _LOOP_DEPTHS) -> Study:
    """Seconds of the first forward and backward pass of a GPT, by its number of layers."""
    ways: dict[str, tuple[Apply, tuple[int, ...]]] = {
        "scan_layers": (scanned, depths),
        "scan_layers, recomputation": (recomputed, depths),
        "plain loop": (one_after_the_other, loop_depths),
    }
    first_step(2, one_after_the_other)  # what torch, jax and lazytpu do only once is not counted
    series: dict[str, Points] = {}
    verdicts = []
    for name, (apply, sizes) in ways.items():
        first_step(3, apply)
        series[name] = [(depth, first_step(depth, apply)) for depth in sizes]
        if apply is not one_after_the_other:
            ratio = series[name][-1][1] / series[name][0][1]
            verdicts.append(Verdict(f"{name}: {sizes[-1]} layers to {sizes[0]}", ratio, _LIMIT))
    title = "Compiling a GPT: forward and backward"
    return Study("scan", title, "layers", "seconds of the first step", series, False, verdicts)


def scanned(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    """Applies blocks as one loop."""
    return lazytpu.scan_layers(list(blocks), x)


def recomputed(blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    """Applies blocks as one loop that keeps only what goes from one to the next."""
    return lazytpu.scan_layers(list(blocks), x, checkpoint=True)


def first_step(depth: int, apply: Apply) -> float:
    """Seconds to record and to compile the first step of a GPT of that depth."""
    torch.manual_seed(0)
    device = lazytpu.device()
    net = GPT(_VOCABULARY, _LENGTH, _WIDTH, heads=4, layers=depth, apply=apply).to(device)
    words = torch.randint(0, _VOCABULARY, (2, _LENGTH)).to(device)
    lazytpu.wait()
    start = time.process_time()
    loss = F.cross_entropy(net(words), words.flatten())
    loss.backward()
    lazytpu.mark_step(wait=True)
    return time.process_time() - start
