"""Times ways to lower a convolution on this machine's CPU:  python -m benchmarks.conv_lowerings [cnn|resnet18]

For every convolution of the model (batch included) and each of its three products (forward, gradient
of the input, gradient of the weight): eager torch, XLA's own convolution, and the matrix products of
``lazytpu.lowering.rules.conv_matmul``, in milliseconds, the best of many runs; the last line is the
sum over the model.  Which lowering the rules choose follows from these numbers.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from benchmarks.timing import best_ms
from lazytpu.lowering.rules import conv_matmul

# images, in channels, height and width, out channels, kernel, stride, padding, how often in the model
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
}


def xla_conv(x, w, stride, padding):
    return lax.conv_general_dilated(x, w, (stride, stride), [(padding, padding)] * 2)


def lowerings(x_shape, w_shape, y_shape, stride, padding):
    """Name -> the three products as functions of two arrays."""
    how = (stride, stride), (padding, padding), (1, 1)
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


def measure(shape):
    """Milliseconds of each product (forward, input, weight) by name; torch first."""
    images, channels, size, out, kernel, stride, padding, _ = shape
    draw = np.random.default_rng(0)
    x_shape, w_shape = (images, channels, size, size), (out, channels, kernel, kernel)
    side = (size + 2 * padding - kernel) // stride + 1
    y_shape = (images, out, side, side)
    x, w, g = (draw.standard_normal(s).astype(np.float32) for s in (x_shape, w_shape, y_shape))
    tx, tw, tg = map(torch.from_numpy, (x, w, g))
    how = [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1

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
    shapes = SHAPES[sys.argv[1] if len(sys.argv) > 1 else "cnn"]
    sums = {}
    for shape in shapes:
        results = measure(shape)
        for name, times in results.items():
            sums[name] = np.add(sums.get(name, 0), np.multiply(times, shape[-1]))
        print(
            shape[:-1], "  ".join(f"{n} {' '.join(f'{t:7.2f}' for t in ts)}" for n, ts in results.items()), flush=True
        )
    print("sum", "  ".join(f"{n} {' '.join(f'{t:7.2f}' for t in ts)} = {sum(ts):.1f}" for n, ts in sums.items()))


if __name__ == "__main__":
    main()
