"""Times sorts and `topk` on this machine's CPU:  python -m benchmarks.sort_lowerings

Sorts: eager torch, stable and not; XLA's sort of two arrays, of values and of places, which is what `lazytpu` lowers to
on GPUs and TPUs; and of one array of numbers that hold both, which it lowers to on CPUs.  `topk`: eager torch, XLA's
kernel for float32, and the first of a sort.  Milliseconds, the best of many runs; the places are compared with eager's.
The choices in `lazytpu.lowering.rules.sorting` follow from these numbers.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from benchmarks.page import RESULTS, machine, save
from benchmarks.timing import best_ms
from lazytpu.lowering.registry import lowering_for
from lazytpu.lowering.rules.sorting import sorted_pair

SHAPES = ((1000,), (32, 1000), (8, 32000), (1_000_000,))
DTYPES = ("float32", "float64", "int64")
BEST = (5, 50, 500)


def numbers(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    """Numbers of which few are equal, if any."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (drawn * 1e9 if dtype == "int64" else drawn).to(getattr(torch, dtype))


def compiled(rule: Callable[[Any], Any], x: torch.Tensor, platform: str = "cpu") -> Callable[[], Any]:
    """A function as it is lowered for a platform, compiled for this machine; a call waits for the places."""
    with jax.enable_x64(True), lowering_for(platform):
        array = jnp.asarray(x.numpy())
        run = jax.jit(rule).lower(array).compile()

    def call() -> Any:
        with jax.enable_x64(True):
            return jax.block_until_ready(run(array))

    return call


def measure_sort(shape: tuple[int, ...], dtype: str, seconds: float) -> dict[str, float]:
    """Milliseconds of each way to sort along the last dimension.

    Raises:
        AssertionError: the places are not those of eager's stable sort.
    """
    x, axis = numbers(shape, dtype), len(shape) - 1
    ways = {
        "two arrays": compiled(lambda x: sorted_pair(x, axis), x, "gpu"),
        "packed": compiled(lambda x: sorted_pair(x, axis), x),
    }
    for run in ways.values():
        np.testing.assert_array_equal(run()[1], x.sort(stable=True)[1])
    ways = {"eager": lambda: x.sort(), "eager stable": lambda: x.sort(stable=True), **ways}
    return {name: round(best_ms(run, seconds), 3) for name, run in ways.items()}


def measure_topk(shape: tuple[int, ...], k: int, seconds: float) -> dict[str, float]:
    """Milliseconds of each way to find the ``k`` greatest float32 along the last dimension.

    Raises:
        AssertionError: the values are not eager's.
    """
    x, axis = numbers(shape, "float32"), len(shape) - 1
    ways = {
        "kernel": compiled(lambda x: lax.top_k(x, k), x),
        "packed": compiled(lambda x: [a[..., :k] for a in sorted_pair(x, axis, descending=True)], x),
    }
    for run in ways.values():
        np.testing.assert_array_equal(run()[0], x.topk(k)[0])
    ways = {"eager": lambda: x.topk(k), **ways}
    return {name: round(best_ms(run, seconds), 3) for name, run in ways.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=0.3, help="spent on each measurement")
    parser.add_argument("--elements", type=int, default=1 << 20, help="of the largest shape that is measured")
    parser.add_argument("--json", type=Path, default=RESULTS / "sort_lowerings.json", help="where results are written")
    options = parser.parse_args(arguments)
    shapes = [shape for shape in SHAPES if math.prod(shape) <= options.elements]
    sorts, selections = [], []
    for dtype in DTYPES:
        for shape in shapes:
            sorts.append({"shape": shape, "dtype": dtype, **measure_sort(shape, dtype, options.seconds)})
            print("sort", sorts[-1], flush=True)
    for shape in shapes:
        for k in BEST:
            selections.append({"shape": shape, "k": k, **measure_topk(shape, k, options.seconds)})
            print("topk", selections[-1], flush=True)
    save(options.json, {"machine": machine(), "sort_ms": sorts, "topk_ms": selections})
    return 0


if __name__ == "__main__":
    sys.exit(main())
