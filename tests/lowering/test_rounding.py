"""Half precision and bytes: a result is rounded as on the CPU, or once."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F

import lazytpu

pytestmark = pytest.mark.usefixtures("optimized")

HALVES = (torch.bfloat16, torch.float16)
Case = Callable[[torch.Tensor], torch.Tensor]


def numbers(*size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0)) * 3


def grid(x: torch.Tensor) -> torch.Tensor:
    """Points on an image or a volume, and some off it."""
    dims = x.dim() - 2
    return x[:, :dims].movedim(1, -1) * 0.5


def tenth(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor(0.1, device=x.device)


def entropy(x: torch.Tensor) -> torch.Tensor:
    return torch.special.entr(x.abs())


LOSSES = (
    F.mse_loss,
    partial(F.smooth_l1_loss, beta=0.7),
    partial(F.huber_loss, delta=0.7),
    lambda x, target, reduction: F.binary_cross_entropy_with_logits(x, target.sigmoid(), reduction=reduction),
)


def sampled(mode: str, padding: str, align: bool) -> Case:
    return lambda x: F.grid_sample(x, grid(x), mode, padding, align)


def slopes(mode: str, padding: str, align: bool) -> Case:
    return lambda x: F.grid_sample(x.detach(), grid(x), mode, padding, align)


def under(mode: str, padding: str) -> Case:
    """An image of which many points read the same elements."""
    return lambda x: F.grid_sample(x, grid(x.detach().repeat(1, *[1, 9, 4][: x.dim() - 2], 3)), mode, padding, False)


def thirds(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(x), device=x.device) % 3


HALF: dict[str, tuple[tuple[int, ...], Case]] = {
    "sum of products": ((5, 10, 5, 20), lambda x: (x * x[:1]).sum((1, 3))),
    "powers": ((100,), lambda x: torch.stack([x**3, x**-2])),
    "ldexp": ((100,), lambda x: torch.ldexp(x, x)),
    "linear": ((2, 3, 7), lambda x: F.interpolate(x, size=10, mode="linear")),
    "small bilinear": ((1, 2, 7, 5), lambda x: F.interpolate(x, scale_factor=(1.7, 0.6), mode="bilinear")),
    "bicubic": ((1, 2, 7, 5), lambda x: F.interpolate(x, size=(9, 4), mode="bicubic", align_corners=True)),
    "trilinear": ((1, 2, 4, 3, 5), lambda x: F.interpolate(x, size=(6, 5, 8), mode="trilinear")),
    "normalized batch": ((3, 2, 5), lambda x: F.batch_norm(x, None, None, x[0, 0, :2], x[0, 1, :2], training=True)),
    "soft margin": ((20,), lambda x: F.soft_margin_loss(x * 20, x.sign() * -1, reduction="none")),
    "sums with numbers": ((200,), lambda x: torch.stack([x + 0.1, 0.3 - x, torch.add(x, x.flip(0), alpha=-1.7)])),
    "products with numbers": (
        (200,),
        lambda x: torch.stack([x * 0.1, x / 0.3, x // 0.3, x * tenth(x), tenth(x) * x]),
    ),
    "remainders by numbers": ((200,), lambda x: torch.stack([x % 0.1, torch.fmod(x, -0.7), x % x.flip(0)])),
    "floors of quotients": ((4000,), lambda x: torch.stack([x // x.flip(0), torch.div(x, 0.3, rounding_mode="trunc")])),
    "sums with integers": ((200,), lambda x: x + torch.arange(200, device=x.device) * 37),
    "powers of numbers": ((200,), lambda x: torch.stack([x.abs() ** 1.7, 1.7**x, x.abs() ** -0.5])),
    "roots of infinity": ((1,), lambda x: (x - math.inf) ** 0.5),
    "bounds": ((200,), lambda x: torch.stack([x.clamp(-0.1, 1.7), F.hardtanh(x, -0.1, 1.7), F.hardshrink(x, 0.1)])),
    "slopes": ((200,), lambda x: torch.stack([F.leaky_relu(x, 0.1), F.elu(x, 0.7), F.softshrink(x, 0.1)])),
    "logarithms": ((200,), lambda x: torch.stack([torch.logit(x.frac().abs()), torch.xlogy(x, x.abs()), entropy(x)])),
    "losses": ((200,), lambda x: torch.stack([loss(x, x.flip(0), reduction="none") for loss in LOSSES])),
    "small numbers of float16": ((200,), lambda x: x * 1e-4 // 1e-6 + (x * 1e-3) ** 3),
    "image at a grid": ((2, 3, 7, 5), sampled("bilinear", "zeros", False)),
    "nearest of an image": ((2, 3, 7, 5), sampled("nearest", "reflection", True)),
    "nearest to points that are none": (
        (1, 2, 3, 4),
        lambda x: F.grid_sample(
            x, torch.tensor([[[[math.nan, 0], [0, math.inf]]]]).to(x), "nearest", align_corners=True
        ),
    ),
    "bicubic at a grid": ((2, 3, 7, 5), sampled("bicubic", "reflection", False)),
    "volume at a grid": ((1, 3, 3, 4, 5), sampled("bilinear", "border", True)),
    "rows added up": ((300, 8), lambda x: x[:3].index_add(0, thirds(x), x, alpha=2)),
    "numbers added up": ((300,), lambda x: x[:3].index_add(0, thirds(x), x)),
    "scattered": ((300,), lambda x: x[:3].scatter_add(0, thirds(x), x)),
    "means of what is scattered": ((300,), lambda x: x[:3].scatter_reduce(0, thirds(x), x, "mean")),
    "logarithms of shares": ((40, 30), lambda x: torch.stack([x.log_softmax(1), x.log_softmax(0)])),
    "histogram": ((200,), lambda x: x.histc(30, -4, 5)),
    "widely padded transposed convolution": (
        (2, 2, 4, 4),
        lambda x: F.conv_transpose2d(
            x, x.reshape(2, 2, 4, 4), stride=(3, 2), padding=(1, 2), output_padding=(2, 3), dilation=4, groups=2
        ),
    ),
}
GRADIENTS: dict[str, tuple[tuple[int, ...], Case]] = {
    **{f.__name__: ((200,), f) for f in (F.silu, F.mish, F.glu, F.logsigmoid, F.hardswish, F.elu, torch.sigmoid)},
    "losses": ((200,), lambda x: torch.stack([loss(x, x.detach().flip(0), reduction="none") for loss in LOSSES])),
    # 256: in what its vectors leave over the CPU rounds in another order
    "mean loss": ((256,), lambda x: F.huber_loss(x, x.detach().flip(0), delta=0.7) + F.mse_loss(x, x.detach().flip(0))),
    "elu of NaN": ((1,), lambda x: F.elu(x * math.nan, 0.7)),
    "grid on an image": ((2, 3, 7, 5), slopes("bilinear", "reflection", True)),
    "bicubic grid": ((2, 3, 7, 5), slopes("bicubic", "zeros", False)),
    "image under a grid": ((2, 3, 7, 5), under("bilinear", "border")),
    "bicubic under a grid": ((2, 3, 7, 5), under("bicubic", "reflection")),
    "nearest under a grid": ((2, 3, 7, 5), under("nearest", "border")),
    "volume under a grid": ((1, 3, 3, 4, 5), under("bilinear", "border")),
    "means of overlapping windows": ((1, 2, 12, 12), lambda x: F.avg_pool2d(x, 5, 2, 1, count_include_pad=False)),
    "replication": ((2, 3, 4, 4), lambda x: F.pad(x, (5, -1, -1, 3), "replicate")),
    "reflection": ((2, 3, 4, 4), lambda x: F.pad(x, (3, 2, 1, 3), "reflect")),
    "soft margin": ((20,), lambda x: F.soft_margin_loss(x, torch.ones_like(x), reduction="none")),
    "weight of a convolution": ((4, 2, 3, 3), lambda w: F.conv2d(numbers(5, 2, 4, 4).to(w), w)),
    "weight of a widely padded transposed convolution": (
        (2, 2, 3, 2, 2),
        lambda w: F.conv_transpose3d(numbers(5, 2, 3, 3, 3).to(w), w, stride=2, output_padding=2, dilation=3),
    ),
}


def gradient(case: Case, x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    y = case(x)
    (found,) = torch.autograd.grad(y, x, numbers(*y.shape).to(y))
    return found


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_precision_is_rounded_as_on_the_cpu_or_once(dtype: torch.dtype, device: torch.device) -> None:
    given = {name: numbers(*size).to(dtype) for name, (size, _) in HALF.items()}
    ours = {name: case(given[name].to(device)) for name, (_, case) in HALF.items()}
    lazytpu.mark_step()  # all cases by one graph
    wrong = []
    for name, (_, case) in HALF.items():
        got, want, exact = ours[name].cpu(), case(given[name]), case(given[name].double())
        assert got.dtype == want.dtype, name
        off = ~torch.isclose(got, want, rtol=0, atol=0, equal_nan=True)
        off &= ~torch.isclose(got.double(), exact, rtol=torch.finfo(dtype).eps, atol=2.0**-24)
        if off.sum() > want.numel() // 50:  # float32 sums in another order round otherwise
            wrong.append(f"{name}: {got[off]}, not {want[off]} nor {exact[off]}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_gradients_of_half_precision(dtype: torch.dtype, device: torch.device) -> None:
    given = {name: numbers(*size).to(dtype) for name, (size, _) in GRADIENTS.items()}
    ours = {name: gradient(case, given[name].to(device)) for name, (_, case) in GRADIENTS.items()}
    lazytpu.mark_step()
    for name, (_, case) in GRADIENTS.items():
        got, want = ours[name].cpu(), gradient(case, given[name])
        # how the sum of products is rounded on the way depends on the vectors of the processor that torch runs on
        ulp = torch.finfo(dtype).eps
        finite = want[want.isfinite()].abs()
        largest = float(finite.max()) if finite.numel() else 0.0
        torch.testing.assert_close(got, want, rtol=2 * ulp, atol=ulp * largest, equal_nan=True, msg=name)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_trace_of_half_precision(dtype: torch.dtype, device: torch.device) -> None:
    x = numbers(300, 300).to(dtype)
    try:
        want = x.trace()
    except NotImplementedError:
        pytest.skip("this torch has it in no half precision")
    assert torch.equal(x.to(device).trace().cpu(), want)


def test_images_of_bytes(device: torch.device) -> None:
    modes, sizes, switch = ("bilinear", "bicubic"), ((9, 4), (3, 11)), (False, True)
    results = []
    for channels in (3, 5):
        shape = (2, channels, 7, 6)
        image = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        for mode, size, align, antialias in product(modes, sizes, switch, switch):
            how = {"size": size, "mode": mode, "align_corners": align, "antialias": antialias}
            ours, theirs = F.interpolate(image.to(device), **how), F.interpolate(image, **how)
            results.append((channels, how, ours, theirs))
    lazytpu.mark_step()
    for channels, how, ours, theirs in results:
        assert torch.equal(ours.cpu(), theirs), (channels, how)


@pytest.mark.filterwarnings("ignore:where received a uint8")
def test_conditions_of_bytes_and_powers_of_booleans(device: torch.device) -> None:
    def results(where: torch.device) -> list[torch.Tensor]:
        bits, bytes_ = torch.tensor([True, False]).to(where), torch.tensor([0, 2], dtype=torch.uint8).to(where)
        return [bits**True, bits**False, bits**2, torch.where(bytes_, bits, ~bits)]

    for ours, theirs in zip(results(device), results(torch.device("cpu")), strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours.cpu(), theirs)


def test_complex_numbers_that_are_not_finite(device: torch.device) -> None:
    z = torch.tensor([1 + 2j, complex("inf"), complex(1, -float("inf")), complex("nan")])
    for f in (torch.add, torch.sub):
        for number in (float("inf"), complex(0, float("inf")), 2.5, 1j):
            torch.testing.assert_close(f(z.to(device), number).cpu(), f(z, number), equal_nan=True, rtol=0, atol=0)
    roots = torch.tensor([4 + 0j, complex(1, -float("inf")), -4 + 0j])
    torch.testing.assert_close((roots.to(device) ** 0.5).cpu(), roots**0.5, equal_nan=True)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_small_parts_of_complex_halves(device: torch.device) -> None:
    z = torch.tensor([6e-6 + 1e-6j, 1e-7 + 1j]).to(torch.complex32)
    assert torch.equal(torch.view_as_real(z.to(device) * 1).cpu(), torch.view_as_real(z * 1))


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch has it from 2.13 on")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_loss_that_torch_computes_by_device(dtype: torch.dtype, device: torch.device) -> None:
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=8)
    ours, theirs = (options._adjust(40, 16, 64, dtype, device=torch.device(d)) for d in (device, "cpu"))
    assert ours == theirs and ours.acc_dtype is torch.float32

    def losses(where: torch.device | str) -> list[torch.Tensor]:
        x, w = (t.to(dtype).to(where).requires_grad_() for t in (numbers(40, 16), numbers(64, 16)))
        loss = F.linear_cross_entropy(x, w, torch.arange(40, device=where), options=options)
        return [loss, *torch.autograd.grad(loss, [x, w])]

    for got, want in zip(losses(device), losses("cpu"), strict=True):
        torch.testing.assert_close(got.cpu(), want, rtol=2**-8 if dtype is torch.bfloat16 else 2**-11, atol=1e-5)


@pytest.mark.parametrize("source", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_numbers_out_of_the_range_of_float8(source: torch.dtype, device: torch.device) -> None:
    large = [449.0, 464.0, 465.0, 480.0, 5000.0, -700.0, 57344.0, 65000.0, float("inf"), -float("inf"), float("nan")]
    x = torch.tensor([*large, 2**-9, 2**-10, 1e-3]).to(source)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz):
        torch.testing.assert_close(
            x.to(device).to(dtype).cpu().float(), x.to(dtype).float(), equal_nan=True, rtol=0, atol=0
        )
