"""Products of small integers, ``lazytpu::integer_linear`` and ``lazytpu::integer_conv``: sums in a wide one.

int8 is summed in int32 and int16 in int64; aten has no such convolution.  XLA's own integer convolution on the CPU
is a plain loop, many times slower than one in floats, so there the patches are laid out and multiplied as a matrix;
and it has no matrix kernel for int64, so wide sums are made in float64 (benchmarks/integer_conv.py).
"""

import itertools
import math

import jax.numpy as jnp
import torch
from jax import lax

from lazytpu.lowering.registry import lowers, target_platform
from lazytpu.lowering.support import wide_products

library = torch.library.Library("lazytpu", "FRAGMENT")
library.define("integer_linear(Tensor x, Tensor weight) -> Tensor")
library.define(
    "integer_conv(Tensor x, Tensor weight, int[] stride, int[] padding, int[] dilation, int groups) -> Tensor"
)


def _sum_dtype(x, weight):
    """Return the dtype of the sums."""
    wide = {torch.int8: torch.int32, torch.int16: torch.int64}
    torch._check(x.dtype == weight.dtype, lambda: f"operands are of one dtype, not {x.dtype} and {weight.dtype}")
    torch._check(x.dtype in wide, lambda: f"operands are int8 or int16, not {x.dtype}")
    return wide[x.dtype]


def _linear_type(x, weight):
    torch._check(weight.dim() == 2, lambda: f"the weight has 2 dimensions, not {weight.dim()}")
    torch._check(
        x.dim() > 0 and x.size(-1) == weight.size(1),
        lambda: f"x {list(x.shape)} and weight {list(weight.shape)} do not match",
    )
    return x.new_empty((*x.shape[:-1], weight.size(0)), dtype=_sum_dtype(x, weight))


def _conv_type(x, weight, stride, padding, dilation, groups):
    like = torch.nn.functional.conv1d, torch.nn.functional.conv2d, torch.nn.functional.conv3d
    torch._check(weight.dim() in (3, 4, 5), lambda: f"the weight has 3 to 5 dimensions, not {weight.dim()}")
    conv = like[weight.dim() - 3]
    dtype = _sum_dtype(x, weight)
    return conv(x.float(), weight.float(), None, stride, padding, dilation, groups).to(dtype)


def _linear_on_cpu(x, weight):
    """Exact: the sums are below 2 ** 53."""
    return torch.nn.functional.linear(x.double(), weight.double()).to(_sum_dtype(x, weight))


def _conv_on_cpu(x, weight, stride, padding, dilation, groups):
    """Exact, as the linear one."""
    dtype = _sum_dtype(x, weight)
    conv = (torch.nn.functional.conv1d, torch.nn.functional.conv2d, torch.nn.functional.conv3d)[weight.dim() - 3]
    return conv(x.double(), weight.double(), None, stride, padding, dilation, groups).to(dtype)


library.impl("integer_linear", _linear_type, "Meta")
library.impl("integer_linear", _linear_on_cpu, "CPU")
library.impl("integer_conv", _conv_type, "Meta")
library.impl("integer_conv", _conv_on_cpu, "CPU")


@lowers(torch.ops.lazytpu.integer_linear.default)
def integer_linear(out, x, weight):
    return _product(x, weight, (((x.ndim - 1,), (1,)), ((), ())), out.dtype)


def _product(a, b, dims, dtype):
    """Return the matrix product, with sums of ``dtype``.

    int16 is summed in float64 on CPUs: products are below 2 ** 30, so sums of fewer than 2 ** 23 are exact.
    """
    terms = math.prod(a.shape[d] for d in dims[0][0])
    if target_platform() == "cpu" and dtype == jnp.int64 and terms < 2**23:
        return lax.dot_general(a.astype(jnp.float64), b.astype(jnp.float64), dims).astype(dtype)
    return wide_products.dot(a, b, dims, dtype)


@lowers(torch.ops.lazytpu.integer_conv.default)
def integer_conv(out, x, weight, stride, padding, dilation, groups):
    if (target_platform() != "tpu" or out.dtype == jnp.int64) and out.size:  # TPUs have none of 64 bits, GPUs no sums
        return _by_patches(out, x, weight, stride, padding, dilation, groups)
    letters = "".join("DHW"[-len(stride) :])
    return lax.conv_general_dilated(
        x,
        weight,
        stride,
        [(p, p) for p in padding],
        rhs_dilation=dilation,
        dimension_numbers=(f"NC{letters}", f"OI{letters}", f"NC{letters}"),
        feature_group_count=groups,
        preferred_element_type=out.dtype,
    )


def _by_patches(out, x, weight, stride, padding, dilation, groups):
    n, sizes = x.shape[0], out.shape[2:]
    x = jnp.pad(x, ((0, 0), (0, 0), *[(p, p) for p in padding]))
    taps = []
    for tap in itertools.product(*map(range, weight.shape[2:])):
        first = [t * d for t, d in zip(tap, dilation, strict=True)]
        last = [f + (size - 1) * s + 1 for f, size, s in zip(first, sizes, stride, strict=True)]
        taps.append(lax.slice(x, (0, 0, *first), (n, x.shape[1], *last), (1, 1, *stride)))
    inputs, length = x.shape[1] // groups, out.size // (n * out.shape[1])
    patches = jnp.stack(taps, 2).reshape(n, groups, inputs * len(taps), length)
    rows = weight.reshape(groups, weight.shape[0] // groups, inputs * len(taps))
    found = _product(rows, patches, (((2,), (2,)), ((0,), (1,))), out.dtype)  # [g,o,n,l]
    return jnp.moveaxis(found, 2, 0).reshape(out.shape)
