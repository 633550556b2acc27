"""Interpolation to sizes that the CPU treats apart: those that stay, and for 2-d nearest those that double."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F

import lazytpu

STAYS, DOUBLES, GROWS, SHRINKS = (7, 1.1), (6, 2.15), (5, 1.7), (6, 0.6)  # size and scale
MODES: dict[int, list[tuple[str, bool]]] = {
    1: [("nearest", False), ("nearest-exact", False), ("linear", False)],
    2: [(mode, False) for mode in ("nearest", "nearest-exact", "bilinear", "bicubic")]
    + [("bilinear", True), ("bicubic", True)],
    3: [("nearest", False), ("nearest-exact", False), ("trilinear", False)],
}
COMBINATIONS = {
    1: [(STAYS,), (DOUBLES,), (GROWS,)],
    2: [(STAYS, STAYS), (STAYS, GROWS), (SHRINKS, STAYS), (DOUBLES, STAYS), (DOUBLES, DOUBLES), (GROWS, DOUBLES)],
    3: [(STAYS, STAYS, STAYS), (GROWS, STAYS, DOUBLES), (STAYS, SHRINKS, STAYS)],
}


def results(x: torch.Tensor, where: torch.device | str, **how: object) -> list[torch.Tensor]:
    """The resized image and, of floats, the gradient."""
    x = x.to(where)
    if not x.dtype.is_floating_point:
        return [F.interpolate(x, **how)]
    x = x.requires_grad_()
    y = F.interpolate(x, **how)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype).to(where)
    return [y.detach(), *torch.autograd.grad(y, x, weights)]


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.uint8], ids=str)
def test_sizes_that_stay(dims: int, dtype: torch.dtype, device: torch.device) -> None:
    found = []
    for (mode, antialias), pairs, align, recompute in product(
        MODES[dims], COMBINATIONS[dims], (False, True), (None, True)
    ):
        linear = not mode.startswith("nearest")
        if (
            (recompute and pairs != COMBINATIONS[dims][1])
            or (align and (not linear or recompute))
            or (dtype is torch.uint8 and linear and dims != 2)
        ):
            continue
        if dtype is torch.bfloat16 and antialias:
            continue  # not on the CPU
        how = {"scale_factor": [s for _, s in pairs], "mode": mode, "recompute_scale_factor": recompute}
        how |= {"align_corners": align} if linear else {}
        how |= {"antialias": True} if antialias else {}
        x = torch.randn(1, 2, *(size for size, _ in pairs), generator=torch.Generator().manual_seed(0)) * 3
        x = (x * 30 + 128).clamp(0, 255).to(dtype) if dtype is torch.uint8 else x.to(dtype)
        found.append((how, results(x, device, **how), results(x, "cpu", **how)))
    lazytpu.mark_step()
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 4e-2, torch.uint8: 0}[dtype]
    for how, ours, theirs in found:
        for got, want in zip(ours, theirs, strict=True):
            torch.testing.assert_close(
                got.cpu(), want, rtol=tolerance, atol=tolerance, msg=lambda m, how=how: f"{how}: {m}"
            )
