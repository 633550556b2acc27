"""Functions of complex numbers on both sides of their branch cuts: values, and signs of zero, as on the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch

import lazytpu

PARTS = (0.0, -0.0, 1.0, -1.0, 0.5, -2.0, 1e-3, 30.0, -30.0)
FUNCTIONS = "abs acos acosh angle asin asinh atan atanh cos cosh exp exp2 log log10 log2 sgn sin sinh sqrt tan tanh"
Function = Callable[[torch.Tensor], torch.Tensor]

CASES: dict[str, Function] = {name: getattr(torch, name) for name in FUNCTIONS.split()}
CASES |= {f"power {n}": lambda z, n=n: z**n for n in (1, 2, 3, 0.5, 2 + 0j)}
CASES |= {
    "power in double": lambda z: torch.float_power(z, 2),
    "power that overflows": lambda z: torch.tensor([1e3 + 0j, 1 + 0j]).to(z.device) ** 300,
    "abs of infinity": lambda z: torch.tensor([complex("inf+nanj"), complex("nan-infj")]).to(z.device).abs(),
}
# Where the CPU's vectors and its other code give zeros of different signs, or the exact result is a tiny number.
SIGNLESS = ("power", "log", "angle")


def plane(device: Any) -> torch.Tensor:
    """Numbers on the axes, with either sign of zero, and between them."""
    return torch.tensor([complex(a, b) for a, b in product(PARTS, PARTS)], dtype=torch.complex64).to(device)


def parts(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(x) if x.is_complex() else x.unsqueeze(-1)


def problems(name: str, z: torch.Tensor, got: torch.Tensor, want: torch.Tensor) -> Iterator[str]:
    if got.dtype != want.dtype:
        yield f"{name}: {got.dtype}, not {want.dtype}"
        return
    g, w = parts(got), parts(want)
    right = torch.isclose(g, w, rtol=1e-5, atol=1e-6, equal_nan=True)
    if not name.startswith(SIGNLESS):
        right &= (g.signbit() == w.signbit()) | w.isnan() | ((w != 0) & (w.abs() < 1e-6))
    for i in (~right.all(-1)).nonzero().flatten().tolist():
        yield f"{name} of {z[i] if len(z) == len(g) else i}: {got[i]}, not {want[i]}"


def test_each_side_of_a_branch_cut(device: torch.device) -> None:
    got = {name: case(plane(device)) for name, case in CASES.items()}
    lazytpu.mark_step()
    z = plane("cpu")
    found = [text for name, case in CASES.items() for text in problems(name, z, got[name].cpu(), case(z))]
    assert not found, "\n".join(found)


def test_parts_that_are_infinite_or_no_number(device: torch.device) -> None:
    ends = (0.0, -1.0, math.inf, -math.inf, math.nan)
    z = torch.tensor([complex(a, b) for a, b in product(ends, ends)])
    names = "cos cosh exp exp2 log log10 log2 sin sinh sqrt".split()
    got = {name: getattr(torch, name)(z.to(device)) for name in names}
    lazytpu.mark_step()
    found = []
    for name in names:
        g, w = parts(got[name].cpu()).abs(), parts(getattr(torch, name)(z)).abs()  # C leaves signs open here
        for i in (~torch.isclose(g, w, equal_nan=True).all(-1)).nonzero().flatten().tolist():
            found.append(f"{name} of {z[i]}: {g[i]}, not {w[i]}")
    assert not found, "\n".join(found)


def test_ends_of_the_plane(device: torch.device) -> None:
    ends = (0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e17, 1e-17)
    z = torch.tensor([complex(a, b) for a, b in product(ends, ends)])
    left, right = z.repeat_interleave(len(z)), z.repeat(len(z))
    names = "acos acosh asin asinh atan atanh expm1 reciprocal rsqrt sigmoid tanh"
    cases = {name: (getattr(torch, name), (z,)) for name in names.split()}
    cases |= {name: (getattr(torch, name), (left, right)) for name in ("mul", "div", "logaddexp", "ldexp")}
    cases |= {f"power {n}": (lambda z, n=n: z**n, (z,)) for n in (0, 2, 3, -1, -2, 0.5, -0.5)}
    finite = left.isfinite() & right.isfinite()
    cases["pow"] = (torch.pow, (left[~finite], right[~finite]))
    got = {name: function(*(x.to(device) for x in given)) for name, (function, given) in cases.items()}
    lazytpu.mark_step()
    found = []
    for name, (function, given) in cases.items():
        g, w = parts(got[name].cpu()), parts(function(*given))
        size = torch.where(w.isfinite(), w.abs(), 0).amax(-1, keepdim=True)
        near = ((g - w).abs() <= 1e-4 * size + 1e-30) & w.isfinite()
        for i in (~(near | (g == w) | (g.isnan() & w.isnan())).all(-1)).nonzero().flatten().tolist():
            found.append(f"{name} of {[x[i].item() for x in given]}: {g[i].tolist()}, not {w[i].tolist()}")
    assert not found, f"{len(found)}: " + "\n".join(found[:20])


def test_a_number_times_its_conjugate_is_real(device: torch.device) -> None:
    z = torch.randn(1000, dtype=torch.complex64, device=device)
    assert not (z * z.conj()).imag.any()
    assert not torch.addcmul(z * 0, z, z.conj()).imag.any()
