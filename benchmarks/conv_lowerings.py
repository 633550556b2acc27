"""Times ways to lower a convolution on a CPU:  python -m benchmarks.conv_lowerings [cnn|resnet18|conv1d] [--json]

For every convolution of the model (batch included) and each of its three products (forward, gradient
of the input, gradient of the weight): eager torch, XLA's own convolution, and the matrix products of
``lazytpu.lowering.support.conv_matmul``, in milliseconds, the best of many runs; the last line is the
sum over the model.  Which lowering the rules choose follows from these numbers, which ``--json`` keeps.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from benchmarks.page import RESULTS, machine, save
from benchmarks.timing import best_ms
from lazytpu.lowering.support import conv_matmul

# images, in channels, length of each side, out channels, kernel, stride, padding, how often in the model
SHAPES = {
    "cnn": [(64, 1, 28, 32, 3, 1, 0, 1), (64, 32, 26, 64, 3, 1, 0, 1)],
    "resnet18": [
        (16, 3, 64, 64, 7, 2, 3, 1),
        (16, 64, 16, 64, 3, 1, 1, 4),
        (16, 64, 16, 128, 3, 2, 1, 1),
        (16, 64, 16, 128, 1, 2, 0, 1),
        (16, 128, 8, 128, 3, 1, 1, 3),
        (16, 128, 8, 256, 3, 2, 1, 1),
        (16, 128, 8, 256, 1, 2, 0, 1),
        (16, 256, 4, 256, 3, 1, 1, 3),
        (16, 256, 4, 512, 3, 2, 1, 1),
        (16, 256, 4, 512, 1, 2, 0, 1),
        (16, 512, 2, 512, 3, 1, 1, 3),
    ],
    "conv1d": [
        (16, 64, 512, 64, 5, 1, 2, 1),
        (8, 128, 256, 128, 3, 1, 1, 1),
        (32, 1, 1024, 32, 9, 1, 4, 1),
        (4, 512, 64, 512, 3, 1, 1, 1),
        (16, 64, 2048, 64, 3, 1, 1, 1),
        (16, 64, 1024, 128, 3, 2, 1, 1),
        (2, 80, 3000, 384, 3, 1, 1, 1),
        (32, 16, 256, 16, 7, 1, 3, 1),
    ],
}


def xla_conv(x, w, stride, padding):
    n = x.ndim - 2
    return lax.conv_general_dilated(x, w, (stride,) * n, [(padding, padding)] * n)


def lowerings(x_shape, w_shape, y_shape, stride, padding):
    """Name -> the three products as functions of two arrays."""
    how = tuple((value,) * (len(x_shape) - 2) for value in (stride, padding, 1))
    x, w = jax.ShapeDtypeStruct(x_shape, jnp.float32), jax.ShapeDtypeStruct(w_shape, jnp.float32)
    return {
        "xla": (
            lambda x, w: xla_conv(x, w, stride, padding),
            lambda g, w: jax.linear_transpose(lambda x: xla_conv(x, w, stride, padding), x)(g)[0],
            lambda g, x: jax.linear_transpose(lambda w: xla_conv(x, w, stride, padding), w)(g)[0],
        ),
        "matmul": (
            lambda x, w: conv_matmul.forward(x, w, y_shape[2:], *how),
            lambda g, w: conv_matmul.input_gradient(g, w, x_shape[2:], *how),
            lambda g, x: conv_matmul.weight_gradient(g, x, w_shape[2:], *how),
        ),
    }


def measure(shape, dims):
    """Milliseconds of each product (forward, input, weight) along some dimensions by name; torch first."""
    images, channels, size, out, kernel, stride, padding, _ = shape
    draw = np.random.default_rng(0)
    x_shape, w_shape = (images, channels, *[size] * dims), (out, channels, *[kernel] * dims)
    side = (size + 2 * padding - kernel) // stride + 1
    y_shape = (images, out, *[side] * dims)
    x, w, g = (draw.standard_normal(s).astype(np.float32) for s in (x_shape, w_shape, y_shape))
    tx, tw, tg = map(torch.from_numpy, (x, w, g))
    how = [stride] * dims, [padding] * dims, [1] * dims, False, [0] * dims, 1

    def torch_gradient(*mask):
        return torch.ops.aten.convolution_backward(tg, tx, tw, None, *how, [*mask, False])

    results = {
        "torch": [
            best_ms(lambda: torch.ops.aten.convolution(tx, tw, None, *how)),
            best_ms(lambda: torch_gradient(True, False)),
            best_ms(lambda: torch_gradient(False, True)),
        ]
    }
    expected = None
    for name, functions in lowerings(x_shape, w_shape, y_shape, stride, padding).items():
        arguments = [(x, w), (g, w), (g, x)]
        compiled = [jax.jit(f) for f in functions]
        values = [np.asarray(f(*a)) for f, a in zip(compiled, arguments, strict=True)]
        expected = values if expected is None else expected
        for got, want in zip(values, expected, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-3 * np.abs(want).max())
        arguments = [tuple(map(jnp.asarray, a)) for a in arguments]
        results[name] = [
            best_ms(lambda f=f, a=a: f(*a).block_until_ready()) for f, a in zip(compiled, arguments, strict=True)
        ]
    return results


def main():
    """Prints one line a convolution, then the sums."""
    jax.config.update("jax_default_matmul_precision", "highest")
    parser = argparse.ArgumentParser(prog="python -m benchmarks.conv_lowerings", description=__doc__)
    parser.add_argument("model", nargs="?", choices=SHAPES, default="cnn")
    parser.add_argument("--json", action="store_true", help="keep the figures in benchmarks/results")
    options = parser.parse_args()
    sums, rows = {}, []
    for shape in SHAPES[options.model]:
        results = measure(shape, 1 if options.model == "conv1d" else 2)
        rows.append({"shape": shape, "ms": {n: [round(float(t), 3) for t in ts] for n, ts in results.items()}})
        for name, times in results.items():
            sums[name] = np.add(sums.get(name, 0), np.multiply(times, shape[-1]))
        print(
            shape[:-1], "  ".join(f"{n} {' '.join(f'{t:7.2f}' for t in ts)}" for n, ts in results.items()), flush=True
        )
    print("sum", "  ".join(f"{n} {' '.join(f'{t:7.2f}' for t in ts)} = {sum(ts):.1f}" for n, ts in sums.items()))
    if options.json:
        save(RESULTS / f"{options.model}_convolutions.json", {"machine": machine(), "rows": rows})


if __name__ == "__main__":
    main()
