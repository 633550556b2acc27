"""Runs the same code on the CPU and on the device, and compares everything torch lets one see of a tensor."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

import lazytpu

Case = Callable[[Any], Any]

_SEEN: dict[str, Callable[[torch.Tensor], Any]] = {
    "size": lambda t: tuple(t.shape),
    "stride": lambda t: _strides(t),
    "storage_offset": lambda t: t.storage_offset(),
    "dtype": lambda t: t.dtype,
    "_version": lambda t: t._version,
    "is_conj": lambda t: t.is_conj(),
    "is_neg": lambda t: t.is_neg(),
    "is_contiguous": lambda t: t.is_contiguous(),
    "requires_grad": lambda t: t.requires_grad,
    "_is_view": lambda t: t._is_view(),
}


def _strides(t: torch.Tensor) -> list[int]:
    """The strides that matter: new tensors may have any for dimensions of length 1, and meta kernels differ there."""
    return [stride for stride, n in zip(t.stride(), t.shape, strict=True) if n != 1 or t._is_view()]


def _strides_that_count(t: torch.Tensor) -> list[int]:
    return [stride for stride, n in zip(t.stride(), t.shape, strict=True) if n != 1 and t.numel()]


_SEEN_LOOSELY = {**_SEEN, "stride": _strides_that_count}


def differences(expected: Any, got: Any, where: str = "", *, loosely: bool = False) -> Iterator[str]:
    """What differs between a nest of CPU results and its twin from the device: tensors, errors and plain values.

    Args:
        where: what the reports begin with.
        loosely: strides of dimensions of length 1 may differ in views too: of tensors made by an op, for example.
    """
    if isinstance(expected, torch.Tensor):
        seen = _SEEN_LOOSELY if loosely else _SEEN
        yield from (f"{where} {text}" for text in _differences_of_tensors(expected, got, seen))
    elif isinstance(expected, (list, tuple)):
        if len(expected) != len(got):
            yield f"{where} {len(got)} results, not {len(expected)}"
        for i, (e, g) in enumerate(zip(expected, got, strict=False)):
            yield from differences(e, g, f"{where}[{i}]", loosely=loosely)
    elif isinstance(expected, Exception) or isinstance(got, Exception):
        if type(expected) is not type(got) or first_line(expected) != first_line(got):
            yield f"{where} {got!r}, not {expected!r}"
    elif expected != got:
        yield f"{where} {got!r}, not {expected!r}"


def _differences_of_tensors(
    expected: torch.Tensor, got: torch.Tensor, seen: dict[str, Callable[[torch.Tensor], Any]]
) -> Iterator[str]:
    different = False
    for name, see in seen.items():
        if see(got) != see(expected):
            different = True
            yield f"{name} {see(got)}, not {see(expected)}"
    if got.device.type != lazytpu.device().type:
        yield f"device {got.device}"
    if not different:
        values, wanted = plain(got.detach().cpu()), plain(expected.detach())
        if not torch.equal(values.isnan(), wanted.isnan()) or not torch.equal(values.nan_to_num(), wanted.nan_to_num()):
            yield f"values\n{values}\nnot\n{wanted}"


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Without torch's lazy conjugate and negative bits."""
    return tensor.resolve_conj().resolve_neg()


def outcome(call: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """What a call returned or raised."""
    try:
        return call(), None
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        return None, error


def first_line(error: Any) -> str:
    """The message without what torch appends for its developers."""
    return str(error).partition("\n")[0]


def numbers(*size: int, device: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(torch.Size(size).numel(), dtype=dtype).reshape(size).clone().to(device)


def check(case: Case, device: torch.device) -> None:
    """Runs a case on both sides; it returns the tensors to compare, or raises."""
    results = []
    for on in ("cpu", device):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            got, error = outcome(lambda on=on: case(on))
        results.append([got, error, sorted({str(w.message).partition(" (Triggered")[0] for w in caught})])
    found = list(differences(*results))
    assert not found, "\n".join(found)
