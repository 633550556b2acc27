"""Times convolutions of small integers on this machine's CPU:  python -m benchmarks.integer_conv

For each shape: the patches laid out and multiplied as a matrix, which is what `lazytpu.lowering.rules.integer_products`
does on CPUs; XLA's own integer convolution, which it does elsewhere; and XLA's convolution of floats of the same
shape.  Milliseconds, the best of many runs; the results of the first two are compared.  The rule's choice of CPUs for
patches follows from these numbers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.page import RESULTS, machine, save
from benchmarks.timing import best_ms
from lazytpu.lowering.registry import lowering_for
from lazytpu.lowering.rules.integer_products import integer_conv


@dataclass(frozen=True, slots=True)
class Shape:
    """A convolution of square images."""

    images: int
    channels: int
    size: int
    out: int
    kernel: int
    stride: int = 1
    padding: int = 0
    groups: int = 1

    def __str__(self) -> str:
        grouped = f", {self.groups} groups" if self.groups > 1 else ""
        window = f"{self.kernel}x{self.kernel}/{self.stride}"
        return f"[{self.images},{self.channels},{self.size},{self.size}] {window} to {self.out}{grouped}"


# layers of the cnn and of a resnet18 of 64x64 images, and a depthwise one
SHAPES = (
    Shape(64, 1, 28, 32, 3),
    Shape(64, 32, 26, 64, 3),
    Shape(16, 3, 64, 64, 7, 2, 3),
    Shape(16, 64, 16, 64, 3, 1, 1),
    Shape(16, 64, 16, 128, 1, 2),
    Shape(16, 256, 4, 256, 3, 1, 1),
    Shape(16, 64, 16, 64, 3, 1, 1, 64),
)
SUMS = {"int8": "int32", "int16": "int64", "float32": "float32"}


def program(shape: Shape, dtype: str, platform: str) -> Callable[[], Any]:
    """The rule as it is for a platform, compiled for this machine; a call waits for the result."""
    x_shape = shape.images, shape.channels, shape.size, shape.size
    w_shape = shape.out, shape.channels // shape.groups, shape.kernel, shape.kernel
    side = (shape.size + 2 * shape.padding - shape.kernel) // shape.stride + 1
    out = jax.ShapeDtypeStruct((shape.images, shape.out, side, side), SUMS[dtype])
    how = [shape.stride] * 2, [shape.padding] * 2, [1, 1], shape.groups
    draw = np.random.default_rng(0)
    with jax.enable_x64(True), lowering_for(platform):
        x, w = (jnp.asarray(draw.integers(-128, 128, s), dtype) for s in (x_shape, w_shape))
        run = jax.jit(lambda x, w: integer_conv(out, x, w, *how)).lower(x, w).compile()

    def call() -> Any:
        with jax.enable_x64(True):
            return run(x, w).block_until_ready()

    return call


def measure(shape: Shape, dtype: str, seconds: float) -> dict[str, float]:
    """Milliseconds of each way.

    Raises:
        AssertionError: the two integer ones do not agree.
    """
    ways = {
        "patches": program(shape, dtype, "cpu"),
        "xla": program(shape, dtype, "gpu"),
        "float": program(shape, "float32", "gpu"),
    }
    np.testing.assert_array_equal(ways["patches"](), ways["xla"]())
    return {name: round(best_ms(run, seconds), 3) for name, run in ways.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=0.5, help="spent on each measurement")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="how many of the shapes")
    parser.add_argument("--json", type=Path, default=RESULTS / "integer_conv.json", help="where results are written to")
    options = parser.parse_args(arguments)
    rows = []
    print(f"{'ms':44} {'dtype':6} {'patches':>9} {'xla':>9} {'float':>9} {'xla/patches':>12}")
    for shape in SHAPES[: options.shapes]:
        for dtype in ("int8", "int16"):
            ms = measure(shape, dtype, options.seconds)
            rows.append({"shape": str(shape), "dtype": dtype, **ms})
            print(
                f"{shape!s:44} {dtype:6} {ms['patches']:9.3f} {ms['xla']:9.3f} {ms['float']:9.3f}"
                f" {ms['xla'] / ms['patches']:12.1f}",
                flush=True,
            )
    save(options.json, {"machine": machine(), "ms": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
