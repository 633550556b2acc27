"""Half precision and bytes: what the CPU rounds on the way to a result is rounded on the device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

HALVES = (torch.bfloat16, torch.float16)
Case = Callable[[torch.Tensor], torch.Tensor]


def numbers(*size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0)) * 3


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
    "widely padded transposed convolution": (
        (2, 2, 4, 4),
        lambda x: F.conv_transpose2d(
            x, x.reshape(2, 2, 4, 4), stride=(3, 2), padding=(1, 2), output_padding=(2, 3), dilation=4, groups=2
        ),
    ),
}
GRADIENTS: dict[str, tuple[tuple[int, ...], Case]] = {
    "replication": ((2, 3, 4, 4), lambda x: F.pad(x, (5, -1, -1, 3), "replicate")),
    "reflection": ((2, 3, 4, 4), lambda x: F.pad(x, (3, 2, 1, 3), "reflect")),
    "soft margin": ((20,), lambda x: F.soft_margin_loss(x, torch.ones_like(x), reduction="none")),
}


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", HALF)
def test_half_precision_is_rounded_where_the_cpu_rounds_it(name: str, dtype: torch.dtype, device: torch.device) -> None:
    size, case = HALF[name]
    x = numbers(*size).to(dtype)
    ours, theirs = case(x.to(device)).cpu(), case(x)
    assert ours.dtype == theirs.dtype
    off = ~torch.isclose(ours, theirs, rtol=0, atol=0, equal_nan=True)
    assert off.sum() <= ours.numel() // 50, (ours[off], theirs[off])  # float32 sums in another order round otherwise


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_of_half_precision(name: str, dtype: torch.dtype, device: torch.device) -> None:
    size, case = GRADIENTS[name]
    found = []
    for where in (device, torch.device("cpu")):
        x = numbers(*size).to(dtype).to(where).requires_grad_()
        y = case(x)
        (gradient,) = torch.autograd.grad(y, x, numbers(*y.shape).to(dtype).to(where))
        found.append(gradient.cpu())
    assert torch.equal(*found)


@pytest.mark.parametrize("channels", [3, 5])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_images_of_bytes(mode: str, channels: int, device: torch.device) -> None:
    image = torch.randint(0, 256, (2, channels, 7, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for size in ((9, 4), (3, 11)):
        for align in (False, True):
            for antialias in (False, True):
                how = {"size": size, "mode": mode, "align_corners": align, "antialias": antialias}
                ours = F.interpolate(image.to(device), **how)
                assert torch.equal(ours.cpu(), F.interpolate(image, **how)), how


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
