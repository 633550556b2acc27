"""Gradients of a convolution's weights as products of taps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from lazytpu.lowering.registry import lowering_for, rule_of
from lazytpu.lowering.support import conv_taps

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("spatial", "kernel", "stride", "padding", "dilation"),
    [
        ((7, 8), (3, 2), (2, 1), (1, 0), (1, 2)),
        ((11,), (4,), (3,), (2,), (2,)),
        ((4, 5, 4), (2, 3, 1), (1, 2, 2), (0, 1, 0), (2, 1, 1)),
        ((8, 8), (1, 1), (3, 2), (0, 0), (1, 1)),
    ],
)
def test_products_of_taps_are_the_gradient(spatial, kernel, stride, padding, dilation):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 2, *spatial, generator=generator, dtype=torch.float64)
    w = torch.zeros(4, 2, *kernel, dtype=torch.float64)
    how = [*map(list, (stride, padding, dilation)), False, [0] * len(kernel), 1]
    grad = torch.randn(aten.convolution(x, w, None, *how).shape, generator=generator, dtype=torch.float64)
    want = aten.convolution_backward(grad, x, w, None, *how, [False, True, False])[1]
    with jax.enable_x64(True):
        got = conv_taps.weight_gradient(jnp.asarray(grad), jnp.asarray(x), kernel, stride, padding, dilation)
    np.testing.assert_allclose(np.asarray(got), want.numpy(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("platform", "dtype", "side", "by_taps"),
    [
        ("tpu", "float32", 3, True),
        ("gpu", "float32", 3, False),
        ("tpu", "bfloat16", 3, False),
        ("tpu", "float32", 9, False),
    ],
)
def test_float32_takes_products_on_tpus_alone(platform, dtype, side, by_taps):
    rule = rule_of(aten.convolution_backward.default)
    sizes = (2, 4, 10 - side, 10 - side), (2, 3, 9, 9), (4, 3, side, side)
    grad, x, w = (jax.ShapeDtypeStruct(size, dtype) for size in sizes)

    def gradient(grad, x, w):
        return rule((None, w, None), grad, x, w, None, (1, 1), (0, 0), (1, 1), False, (0, 0), 1, (False, True, False))[
            1
        ]

    with lowering_for(platform):
        text = str(jax.make_jaxpr(gradient)(grad, x, w))
    assert ("conv_general_dilated" not in text) == by_taps
