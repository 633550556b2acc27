"""What differs between the outcomes of a program on the CPU and on the device."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator

import torch

from tests.fuzz.program import Program
from tests.fuzz.running import CPU, Outcome, Seen, run

# What a rounding is worth, relative to the largest magnitude of the tensor.
_TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 1e-5, torch.float64: 1e-12}
_TOLERANCE |= {torch.complex64: 1e-5, torch.complex128: 1e-12}
_PRECISE = {"float16": "float64", "bfloat16": "float64", "float32": "float64", "complex64": "complex128"}


def differences(program: Program, expected: Outcome, got: Outcome, largest: float) -> list[str]:
    """What differs, the place first and the kind last, after a colon.

    Args:
        largest: the largest magnitude of a float in the program: what rounding may be relative to.
    """
    found, precise = [], None
    for place, want in expected.seen.items():
        have = got.seen.get(place)
        if have is None:
            if "the call" not in got.seen:
                found.append(f"{place}: missing")
        elif isinstance(want, str) or isinstance(have, str):
            if want != have:
                kind = "storages" if place.startswith("storages") else "error"
                found.append(f"{place}: {kind}\n  {_short(have)}\n  not {_short(want)}")
        else:
            found += (f"{place}: {text}" for text in _of_layouts(program, place, want, have))
            if want.shape == have.shape and want.dtype == have.dtype and not close(want.values, have.values):
                precise = precise or _precisely(program)
                if not _nearly(want, have, precise.seen.get(place), largest):
                    found.append(f"{place}: values\n{have.values}\nnot\n{want.values}")
    found += (
        f"{place}: error\n  {text}\n  not raised" for place, text in got.seen.items() if place not in expected.seen
    )
    return found


def kind_of(difference: str) -> str:
    """The kind of a difference: values, error, storages, shape ..."""
    return difference.partition("\n")[0].rpartition(": ")[2].partition(" ")[0]


def _short(x: Seen | str) -> str:
    return x if isinstance(x, str) else f"a tensor {x.dtype} {list(x.shape)}"


_VISIBLE: dict[str, Callable[[Seen], object]] = {
    "shape": lambda s: s.shape,
    "dtype": lambda s: s.dtype,
    "bits": lambda s: s.bits,
    "stride": lambda s: s.stride,
    "offset": lambda s: s.offset,
    "requires_grad": lambda s: s.requires_grad,
    "version": lambda s: s.version,
}

_INVISIBLE = {
    "version": ("compile", "jit", "dynamo"),  # a captured function writes once to an argument that it changes twice
    "requires_grad": ("compile",),  # its results are detached
}


def _of_layouts(program: Program, place: str, want: Seen, have: Seen) -> Iterator[str]:
    for name, see in _VISIBLE.items():
        if program.mode in _INVISIBLE.get(name, ()) or (name == "version" and ".grad " in place):
            continue
        if see(want) != see(have):
            yield f"{name} {see(have)}, not {see(want)}"


def close(want: torch.Tensor, have: torch.Tensor) -> bool:
    """Whether values are the same but for rounding of the last bits."""
    if want.dtype is torch.complex32:
        want, have = want.to(torch.complex64), have.to(torch.complex64)  # torch compares none of them
    if want.dtype.is_floating_point and want.dtype.itemsize == 1:
        want, have = want.half(), have.half()  # nor has it a tolerance for these
    if torch.equal(want, have):
        return True
    if want.dtype not in _TOLERANCE:
        return False
    tolerance = _TOLERANCE[want.dtype]
    want, have = _wide(want), _wide(have)
    same = (want == have) | (want.isnan() & have.isnan())
    finite = want.isfinite() & have.isfinite()
    if not bool((same | finite).all()):
        return False
    scale = max(1.0, want[finite].abs().max().item() if bool(finite.any()) else 1.0)
    return bool(((want - have).abs() <= scale * tolerance).logical_or(same).all())


def _wide(t: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(t.to(torch.complex128)) if t.is_complex() else t.double()


def _precisely(program: Program) -> Outcome:
    """The outcome on the CPU in float64."""

    def text(line: str) -> str:
        return re.sub(r"\btorch\.(b?float16|float32|complex64)\b", lambda m: f"torch.{_PRECISE[m[1]]}", line)

    parts = {name: tuple(map(text, getattr(program, name))) for name in ("inputs", "body", "after")}
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return run(dataclasses.replace(program, **parts), CPU)
    finally:
        torch.set_default_dtype(default)


def _nearly(want: Seen, have: Seen, precise: Seen | str | None, largest: float) -> bool:
    """Whether the device is about as far from the truth as the CPU."""
    if not isinstance(precise, Seen) or precise.shape != want.shape or want.dtype not in _TOLERANCE:
        return False
    wide = torch.complex128 if want.values.is_complex() else torch.float64
    truth = precise.values.to(wide)
    ours, theirs = (have.values.to(wide) - truth).abs(), (want.values.to(wide) - truth).abs()
    if not bool(ours.isfinite().all()):
        return False
    return bool(ours.max() <= 8 * theirs.max() + _TOLERANCE[want.dtype] / 2 * largest)
