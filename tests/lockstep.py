"""Runs the same code on the CPU and on the device, and compares everything torch lets one see of a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import lazytpu

_SEEN = (
    ("size", lambda t: tuple(t.shape)),
    ("stride", lambda t: t.stride()),
    ("storage_offset", lambda t: t.storage_offset()),
    ("dtype", lambda t: t.dtype),
    ("_version", lambda t: t._version),
    ("is_conj", lambda t: t.is_conj()),
    ("is_neg", lambda t: t.is_neg()),
    ("is_contiguous", lambda t: t.is_contiguous()),
    ("requires_grad", lambda t: t.requires_grad),
    ("_is_view", lambda t: t._is_view()),
)


def differences(expected: torch.Tensor, got: torch.Tensor) -> str:
    """What differs between a CPU tensor and its twin on the device; empty when nothing does."""
    found = [f"{name} {f(got)} not {f(expected)}" for name, f in _SEEN if f(got) != f(expected)]
    if got.device.type != lazytpu.device().type:
        found.append(f"device {got.device}")
    if not found:
        values = got.detach().cpu()
        wanted = expected.detach().resolve_conj().resolve_neg()
        if not torch.allclose(values.resolve_conj().resolve_neg(), wanted, rtol=0, atol=0, equal_nan=True):
            found.append(f"values\n{values}\nnot\n{wanted}")
    return "; ".join(found)


def assert_same(expected: Any, got: Any, what: str = "") -> None:
    """Raises unless the nests of tensors look the same."""
    if isinstance(expected, torch.Tensor):
        different = differences(expected, got)
        assert not different, f"{what}: {different}"
    elif isinstance(expected, (list, tuple)):
        assert len(expected) == len(got), what
        for i, (e, g) in enumerate(zip(expected, got, strict=True)):
            assert_same(e, g, f"{what}[{i}]")
    else:
        assert expected == got, f"{what}: {got!r} not {expected!r}"


def outcome(call: Callable[[], Any]) -> tuple[Any, Exception | None]:
    """What a call returned or raised."""
    try:
        return call(), None
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError) as error:
        return None, error


def assert_same_error(expected: Exception | None, got: Exception | None, what: str = "") -> None:
    """Raises unless both sides raised the same error, or none."""
    assert type(expected) is type(got), f"{what}: {got!r} not {expected!r}"
    if expected is not None:
        assert first_line(got) == first_line(expected), what


def first_line(error: Exception | None) -> str:
    """The message without what torch appends for its developers."""
    return str(error).partition("\n")[0]
