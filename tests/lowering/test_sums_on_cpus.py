"""Sums and convolutions that CPUs get as products and loops have the values of torch's CPU kernels."""

import jax
import numpy as np
import pytest
import torch
from torch.nn import functional as F

import lazytpu
from lazytpu.lowering.registry import lowering_for
from lazytpu.lowering.support import sums

DEVICE = lazytpu.device()


def _both(function, *tensors):
    """Return what a function gives on the CPU in float64, and on the device."""
    right = function(*(t.double() for t in tensors))
    lazytpu.config.compile_after, before = 1, lazytpu.config.compile_after
    try:
        results = [r.cpu() for r in function(*(t.to(DEVICE) for t in tensors))]
    finally:
        lazytpu.config.compile_after = before
    return right, results


def _close(right, results, tolerance=2e-6):
    for r, x in zip(right, results, strict=True):
        assert x.dtype == torch.float32
        scale = r.abs().max().clamp(min=1e-9)
        assert x.shape == r.shape
        assert ((x.double() - r).abs().max() / scale) < tolerance


def _gradients(y, xs):
    ramp = torch.linspace(-1, 2, y.numel(), dtype=y.dtype, device=y.device).reshape(y.shape)
    return torch.autograd.grad(y, xs, ramp)


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "padding", "dilation", "multiple"),
    [
        ((2, 3, 9, 37), (9, 8), (1, 1), (4, 2), (1, 1), 1),  # many taps, a row in three blocks, the last one short
        ((3, 2, 20, 9), (13, 5), (2, 3), (0, 1), (1, 1), 2),
        ((4, 2, 9, 40), (2, 3), (2, 3), (0, 1), (2, 1), 2),
        ((3, 2, 33), (4,), (3,), (2,), (1,), 1),
        ((2, 4, 6, 6), (1, 2), (3, 2), (0, 0), (1, 1), 1),  # remainders of the stride that no tap reaches
        ((1, 2, 4, 5, 18), (2, 2, 3), (1, 2, 1), (1, 0, 1), (1, 1, 2), 1),
        ((1, 24, 20, 24), (3, 2), (1, 2), (1, 0), (1, 1), 2),  # a single image
    ],
)
def test_depthwise_convolutions_and_their_gradients(size, kernel, stride, padding, dilation, multiple):
    convolution = (F.conv1d, F.conv2d, F.conv3d)[len(kernel) - 1]

    def step(x, w):
        x, w = x.requires_grad_(), w.requires_grad_()
        y = convolution(x, w, None, stride, padding, dilation, size[1])
        return [y, *_gradients(y, (x, w))]

    torch.manual_seed(0)
    _close(*_both(step, torch.randn(size), torch.randn(size[1] * multiple, 1, *kernel)))


@pytest.mark.parametrize(
    ("stride", "padding", "dilation"),
    [((1, 1), (1, 0), (1, 1)), ((2, 3), (0, 2), (1, 2)), ((1, 2), (2, 1), (2, 1))],
)
def test_convolutions_of_images_and_their_gradients(stride, padding, dilation):
    def step(x, w, b):
        x, w = x.requires_grad_(), w.requires_grad_()
        y = F.conv2d(x, w, b, stride, padding, dilation)
        z = F.conv_transpose2d(y, w, None, stride, padding, dilation=dilation)
        return [y, z, *_gradients(z, (x, w))]

    torch.manual_seed(0)
    _close(*_both(step, torch.randn(3, 8, 13, 16), torch.randn(9, 8, 3, 4), torch.randn(9)))


@pytest.mark.parametrize("affine", [True, False])
def test_group_normalization_and_its_gradients(affine):
    def step(x, w, b):
        x, w, b = (t.requires_grad_() for t in (x, w, b))
        y = F.group_norm(x, 3, w, b) if affine else F.group_norm(x, 3)
        return [y, *_gradients(y, (x, w, b) if affine else (x,))]

    torch.manual_seed(0)
    _close(*_both(step, torch.randn(4, 12, 8, 14) + 1, torch.randn(12), torch.randn(12)), 2e-5)


@pytest.mark.parametrize(
    ("size", "channels", "kernel", "stride"),
    [
        ((3, 4, 9, 11), 6, (1, 1), (1, 1)),  # more places than weights: a product for each image
        ((3, 24, 2, 1), 20, (1, 1), (1, 1)),  # more weights
        ((2, 3, 12), 5, (1,), (5,)),  # places between the windows, and behind the last one
        ((2, 3, 11, 13), 7, (3, 2), (3, 2)),  # windows side by side
        ((1, 2, 5, 4, 7), 3, (2, 1, 3), (2, 1, 3)),
    ],
)
def test_windows_that_do_not_overlap_and_their_gradients(size, channels, kernel, stride):
    n = len(kernel)
    convolution = (F.conv1d, F.conv2d, F.conv3d)[n - 1]
    transposed = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[n - 1]

    def step(x, w, b):
        x, w = x.requires_grad_(), w.requires_grad_()
        y = convolution(x, w, b, stride)
        z = transposed(y, w, None, stride)
        return [y, z, *_gradients(z, (x, w))]

    torch.manual_seed(0)
    _close(*_both(step, torch.randn(size), torch.randn(channels, size[1], *kernel), torch.randn(channels)))


def test_an_infinite_weight_reaches_only_what_it_is_multiplied_with():
    weight = torch.ones(2, 1, 3, 3)
    weight[0, 0, 1, 1] = float("inf")

    def step(x, w):
        x = x.requires_grad_()
        return torch.autograd.grad(F.conv2d(x, w, None, 2, 1, 1, 2).sum(), x)

    (right,), (result,) = _both(step, torch.randn(1, 2, 6, 6), weight)
    assert torch.equal(right.isinf()[:, :, ::2, ::2], result.isinf()[:, :, ::2, ::2])
    assert torch.equal(right[:, 1].float(), result[:, 1])
    assert not result[:, :, 1::2, 1::2].isnan().any()  # taps at the corners alone


@pytest.mark.parametrize("size", [(4, 16, 24, 24), (64, 16, 3, 3), (2, 8, 101, 103)])
def test_statistics_of_channels(size):
    def step(x, w, b):
        x, w, b = x.requires_grad_(), w.requires_grad_(), b.requires_grad_()
        y = F.batch_norm(x, None, None, w, b, True)
        z = F.group_norm(x, 4, w, b)
        return y.detach(), z.detach(), *_gradients(y, (x, w, b)), *_gradients(z, (x, w, b))

    torch.manual_seed(0)
    _close(
        *_both(step, torch.randn(size) + 3, torch.rand(size[1]), torch.rand(size[1])), tolerance=1e-4
    )  # sums of some 20,000 terms that cancel


@pytest.mark.parametrize("size", [(8, 64, 256), (1024, 72), (7, 5, 2000)])
def test_gradients_of_a_bias(size):
    def step(x, w, b):
        b = b.requires_grad_()
        y = F.gelu(F.linear(x, w, b)) * torch.linspace(0, 1, size[-1], dtype=x.dtype, device=x.device)
        return *_gradients(y, (b,)), y.detach().sum(tuple(range(len(size) - 1)))

    torch.manual_seed(0)
    _close(*_both(step, torch.randn(*size[:-1], 16), torch.randn(size[-1], 16), torch.rand(size[-1])))


def test_a_sum_has_what_is_not_finite():
    x = torch.ones(64, 2, 1024)
    x[3, 1, 5], x[4, 0, 6], x[5, 0, 7] = float("inf"), float("nan"), -float("inf")
    x[6, 0, 5] = -float("inf")
    (right,), (result,) = _both(lambda x: (x.sum((0, 1)),), x)
    assert torch.equal(right.float().isnan(), result.isnan())
    assert torch.equal(right.float().nan_to_num(0), result.nan_to_num(0))


@pytest.mark.parametrize("shape", [(64, 48), (3, 40, 7, 6), (5000, 9), (6, 5000), (2, 3, 4)])
@pytest.mark.parametrize("norm", [F.layer_norm, F.rms_norm])
def test_normalized_rows_and_their_gradients(shape, norm):
    size = shape[2:] if len(shape) == 4 else shape[-1:]

    def step(x, *of_parts):
        parts = [p.requires_grad_() for p in (x, *of_parts)]
        y = norm(x, size, *parts[1:])
        return [y, *_gradients(y, parts)]

    torch.manual_seed(0)
    parts = [torch.randn(size) for _ in range(2 if norm is F.layer_norm else 1)]
    _close(*_both(step, torch.randn(shape) + 3, *parts), tolerance=1e-5)
    _close(*_both(lambda x: [norm(x, size)], torch.randn(shape)))


@pytest.mark.parametrize(
    ("size", "axes"),
    [
        ((3, 40, 50), (0, 1)),
        ((3, 40, 50), (2,)),
        ((3, 40, 50), (1,)),
        ((3, 40, 50), (0, 1, 2)),
        ((3, 40, 50), ()),
        ((2, 3, 40, 50), (0, 1, 2)),
        ((2, 3, 40, 50), (-1,)),
        ((200, 50), (0,)),
        ((200, 50), (1,)),
        ((4096,), (0,)),
        ((5000, 2), (0,)),  # too long for a product
    ],
)
def test_sums_for_a_mesh_of_cpus(size, axes):
    x = np.random.default_rng(0).normal(1, 1, size).astype(np.float32)
    with lowering_for("cpu", on_mesh=True):
        found = jax.jit(lambda x: sums.total(x, axes))(x)
        rows = jax.jit(sums.total_of_rows)(x)
    np.testing.assert_allclose(found, x.astype(np.float64).sum(axes), 1e-5)
    np.testing.assert_allclose(rows, x.astype(np.float64).reshape(-1, size[-1]).sum(0) if len(size) > 1 else x, 1e-5)


@pytest.mark.parametrize("shape", [(32, 3, 64, 64), (64, 64, 7, 7), (2, 2, 2, 2, 8, 8, 8), (500, 300)])
def test_sums_over_several_dimensions_are_accurate(shape):
    def sums_of(x):
        y = x * 1.0000001
        return [y.sum(), y.mean((0, *range(2, y.ndim))), y.var(), y.norm(), F.mse_loss(y, -y), F.l1_loss(y, y / 2)]

    torch.manual_seed(0)
    for x in (torch.rand(shape), torch.full(shape, 0.9446)):
        for right, result in zip(*_both(sums_of, x), strict=True):
            assert torch.allclose(result.double(), right, rtol=1e-5, atol=1e-7)  # a loop over all is off by 1e-3
