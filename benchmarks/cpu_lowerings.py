"""Times what lazytpu lowers in a way of its own beside XLA's plain op:  python -m benchmarks.cpu_lowerings [--json]

For each op its result and all gradients on this machine's CPU, in milliseconds, the best of several runs: eager
torch, the op as it is written in jax, and the op on the device (recording included).  The rules keep a form of their
own where the last column is below the middle one; ``--json`` keeps the figures in benchmarks/results, where
``python -m benchmarks --from-json`` reads them.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from jax import lax

import lazytpu
from benchmarks.page import RESULTS, machine, markdown_table, on_machine, save
from benchmarks.timing import best_ms

Array = Any


@dataclass(frozen=True)
class Case:
    """An op in both languages, and the sizes of its floating operands."""

    name: str
    sizes: Sequence[tuple[int, ...]]
    torch: Callable[..., torch.Tensor]
    jax: Callable[..., Array]


def _window(x: Array, kernel: int, stride: int, initial: Any, reduce: Any) -> Array:
    return lax.reduce_window(x, initial, reduce, (1, 1, kernel, kernel), (1, 1, stride, stride), "VALID")


def _conv(x: Array, w: Array, padding: int, groups: int = 1, stride: int = 1) -> Array:
    n = x.ndim - 2
    return lax.conv_general_dilated(x, w, (stride,) * n, [(padding, padding)] * n, feature_group_count=groups)


def _conv_transpose(x: Array, w: Array) -> Array:
    flipped = jnp.flip(jnp.swapaxes(w, 0, 1), (2, 3))
    return lax.conv_general_dilated(x, flipped, (1, 1), [(2, 2)] * 2, lhs_dilation=(2, 2))


def _normalized(x: Array, axes: int | tuple[int, ...]) -> Array:
    mean = jnp.mean(x, axes, keepdims=True)
    return (x - mean) * lax.rsqrt(jnp.mean((x - mean) ** 2, axes, keepdims=True) + 1e-5)


def _dropped(x: Array) -> Array:
    return jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, x.shape), x * 2, 0)


_PLACES = np.random.default_rng(0).integers(0, 5000, 4096)


@cache
def _tokens(device: str) -> torch.Tensor:
    return torch.from_numpy(_PLACES).to(device)


CASES = [
    Case(
        "max_pool2d, 2 x 2",
        [(32, 32, 56, 56)],
        lambda x: F.max_pool2d(x, 2),
        lambda x: _window(x, 2, 2, -jnp.inf, lax.max),
    ),
    Case(
        "max_pool2d, 3 x 3, stride 2",
        [(16, 64, 32, 32)],
        lambda x: F.max_pool2d(x, 3, 2),
        lambda x: _window(x, 3, 2, -jnp.inf, lax.max),
    ),
    Case(
        "avg_pool2d, 3 x 3, stride 1",
        [(16, 64, 32, 32)],
        lambda x: F.avg_pool2d(x, 3, 1),
        lambda x: _window(x, 3, 1, 0.0, lax.add) / 9,
    ),
    Case(
        "adaptive_avg_pool2d to 1 x 1",
        [(32, 256, 14, 14)],
        lambda x: F.adaptive_avg_pool2d(x, 1),
        lambda x: jnp.mean(x, (2, 3), keepdims=True),
    ),
    Case(
        "conv1d, 5",
        [(16, 64, 512), (64, 64, 5)],
        lambda x, w: F.conv1d(x, w, padding=2),
        lambda x, w: _conv(x, w, 2),
    ),
    Case(
        "conv2d, 3 x 3",
        [(16, 64, 32, 32), (64, 64, 3, 3)],
        lambda x, w: F.conv2d(x, w, padding=1),
        lambda x, w: _conv(x, w, 1),
    ),
    Case(
        "conv2d, 3 x 3, 4 groups",
        [(16, 64, 32, 32), (64, 16, 3, 3)],
        lambda x, w: F.conv2d(x, w, padding=1, groups=4),
        lambda x, w: _conv(x, w, 1, 4),
    ),
    Case(
        "conv2d, 3 x 3, depthwise",
        [(16, 64, 32, 32), (64, 1, 3, 3)],
        lambda x, w: F.conv2d(x, w, padding=1, groups=64),
        lambda x, w: _conv(x, w, 1, 64),
    ),
    Case(
        "conv3d, 3 x 3 x 3",
        [(4, 16, 16, 16, 16), (16, 16, 3, 3, 3)],
        lambda x, w: F.conv3d(x, w, padding=1),
        lambda x, w: _conv(x, w, 1),
    ),
    Case(
        "conv_transpose2d, 4 x 4, stride 2",
        [(16, 64, 16, 16), (64, 32, 4, 4)],
        lambda x, w: F.conv_transpose2d(x, w, stride=2, padding=1),
        _conv_transpose,
    ),
    Case(
        "interpolate, bilinear, twice the size",
        [(8, 32, 32, 32)],
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
        lambda x: jax.image.resize(x, (*x.shape[:2], 64, 64), "bilinear"),
    ),
    Case(
        "layer_norm",
        [(4096, 768)],
        lambda x: F.layer_norm(x, (768,)),
        lambda x: _normalized(x, -1),
    ),
    Case(
        "batch_norm in training",
        [(32, 64, 32, 32)],
        lambda x: F.batch_norm(x, None, None, training=True),
        lambda x: _normalized(x, (0, 2, 3)),
    ),
    Case("softmax", [(4096, 1024)], lambda x: F.softmax(x, -1), lambda x: jax.nn.softmax(x, -1)),
    Case(
        "embedding of 4,096 tokens",
        [(5000, 256)],
        lambda w: F.embedding(_tokens(str(w.device)), w),
        lambda w: jnp.take(w, _PLACES, 0),
    ),
    Case("dropout", [(4096, 1024)], lambda x: F.dropout(x, 0.5), _dropped),
]


def measure(case: Case) -> dict[str, float]:
    """Milliseconds of the result and all gradients, by backend."""
    draw = np.random.default_rng(0)
    arrays = [draw.standard_normal(size).astype(np.float32) / math.sqrt(size[-1]) for size in case.sizes]
    out = case.torch(*map(torch.from_numpy, arrays))
    given = draw.standard_normal(tuple(out.shape)).astype(np.float32)

    def on(device: Any) -> Callable[[], Any]:
        inputs = [torch.from_numpy(a).to(device).requires_grad_() for a in arrays]
        gradient = torch.from_numpy(given).to(device)

        def step() -> Any:
            y = case.torch(*inputs)
            found = y, torch.autograd.grad(y, inputs, gradient)
            lazytpu.wait()
            return found

        return step

    def both(gradient: Array, *inputs: Array) -> Any:
        y, pull = jax.vjp(case.jax, *inputs)
        return y, pull(gradient)

    compiled, operands = jax.jit(both), [jnp.asarray(a) for a in (given, *arrays)]
    times = {
        "eager": best_ms(on("cpu"), seconds=1.0),
        "jax": best_ms(lambda: jax.block_until_ready(compiled(*operands)), seconds=1.0),
        "lazytpu": best_ms(on(lazytpu.device()), seconds=1.0),
    }
    return {name: round(ms, 3) for name, ms in times.items()}


def markdown(result: dict[str, Any]) -> str:
    """What the page shows of a saved result."""
    rows = [[row["op"], *(f"{row['ms'][name]:.2f}" for name in ("eager", "jax", "lazytpu"))] for row in result["rows"]]
    return on_machine(result["machine"]) + "\n\n" + markdown_table(("ms", "eager", "jax", "lazytpu"), rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints one line an op."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu_lowerings", description=__doc__)
    parser.add_argument("--json", action="store_true", help="keep the figures in benchmarks/results")
    keep = parser.parse_args(arguments).json
    jax.config.update("jax_default_matmul_precision", "highest")
    rows = []
    for case in CASES:
        times = measure(case)
        rows.append({"op": case.name, "sizes": case.sizes, "ms": times})
        print(f"{case.name:40s}", "  ".join(f"{name} {ms:9.3f}" for name, ms in times.items()), flush=True)
    if keep:
        result = {"machine": machine(), "rows": rows}
        save(RESULTS / "cpu_lowerings.json", result)
    return 0


if __name__ == "__main__":
    main()
