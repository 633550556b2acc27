"""An op of one's own with a kernel in numpy for the CPU and a Pallas kernel for the device.

python examples/custom_op.py
"""

from __future__ import annotations

import jax
import torch
from jax.experimental import pallas as pl

import lazytpu
from lazytpu.lowering import lowers, target_platform


@torch.library.custom_op("example::leaky_square", mutates_args=(), device_types="cpu")
def leaky_square(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(x.numpy() * abs(x.numpy()))


@leaky_square.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def kernel(x_ref, out_ref):
    x = x_ref[...]
    out_ref[...] = x * abs(x)


@lowers(torch.ops.example.leaky_square.default)
def leaky_square_rule(out, x):
    shape = jax.ShapeDtypeStruct(out.shape, out.dtype)
    return pl.pallas_call(kernel, out_shape=shape, interpret=target_platform() == "cpu")(x)


def main() -> None:
    x = torch.linspace(-2, 2, 8)
    y = leaky_square(x.to(lazytpu.device()))
    print(lazytpu.ir_text(y))
    print("largest difference from the CPU's kernel:", (y.cpu() - leaky_square(x)).abs().max().item())


if __name__ == "__main__":
    main()
