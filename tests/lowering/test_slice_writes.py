"""Slices that are computed from the tensor they are written to."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import lazytpu
from lazytpu.diagnosis import events
from lazytpu.lowering import lower
from tests.support.dynamo_marks import FRESH

pytestmark = FRESH
device = lazytpu.device()
on_cpu = pytest.mark.skipif(lazytpu.platform() != "cpu", reason="elsewhere XLA does not fuse such writes")

Tensor = torch.Tensor
SHAPES = [(4, 6), (5, 2, 3), (4, 1, 3, 2)]
DTYPES = [
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
]


def later(t: Tensor) -> None:
    t[1:] = t[:-1].clone()


def earlier(t: Tensor) -> None:
    t[:-1] = t[1:].clone()


def newest_first(t: Tensor) -> None:
    t[1:] = t[:-1].clone()
    t[0] = t[2]


def rolled(t: Tensor) -> None:
    t[1:] = t.roll(1, 0)[1:]


def flipped(t: Tensor) -> None:
    t[0] = t[0] + t[0].flip(-1)


def rows_flipped(t: Tensor) -> None:
    t[1:4] = t[1:4].flip(0)


def rows_joined(t: Tensor) -> None:
    t[1:] = torch.cat([t[2:3], t[:1], t[: len(t) - 3]])


def swapped(t: Tensor) -> None:
    first = t[0].clone()
    t[0] = t[1]
    t[1] = first


def every_second(t: Tensor) -> None:
    t[:4:2] = t[1:4:2].clone()


def one_by_one(t: Tensor) -> None:
    for i in range(1, len(t)):
        t[i] = t[i - 1] + t[i]


def own_rows(t: Tensor) -> None:
    t[1:].add_(t[1:])


def within_a_row(t: Tensor) -> None:
    t[1][1:].copy_(t[1][:-1].clone())


def a_row_from_its_sum(t: Tensor) -> None:
    t[0] = t.sum(0)


def as_strided(t: Tensor) -> None:
    t.as_strided((2, 3), (3, 1), 3).copy_(t.as_strided((2, 3), (3, 1), 1).clone())


WRITES = [
    *(later, earlier, newest_first, rolled, flipped, rows_flipped, rows_joined, swapped, every_second, one_by_one),
    *(own_rows, within_a_row, a_row_from_its_sum, as_strided),
]


def write_all(flat: list[Tensor], writes: list[Callable[[Tensor], None]], shape: tuple[int, ...]) -> list[Tensor]:
    results = []
    for x, write in zip(flat, writes, strict=True):
        t = x.view(shape)
        write(t)
        results += [t + t, t.sum(0)]
    return results


def contents(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    x = torch.arange(torch.Size(shape).numel()) * 7 % 11
    return x.to(dtype) if dtype is not torch.bool else x % 3 == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values(dtype: torch.dtype) -> None:
    for shape in SHAPES if dtype is torch.int64 else [SHAPES[DTYPES.index(dtype) % 3]]:
        given = [contents(shape, dtype) for _ in WRITES]
        ours = [x.to(device) for x in given]
        got = write_all(ours, WRITES, shape)
        wanted = write_all(given, WRITES, shape)
        lazytpu.mark_step()
        torch.testing.assert_close([x.cpu() for x in [*got, *ours]], [*wanted, *given], rtol=0, atol=0)


def test_values_made_in_the_graph() -> None:
    makes: list[Callable[..., Tensor]] = [torch.arange, lambda n, **how: torch.ones(n // 2, 2, **how).cumsum(0)]
    for shape, make in zip(SHAPES, makes, strict=False):

        def run(make: Any, where: Any, shape: Any) -> list[Tensor]:
            flat = [make(torch.Size(shape).numel(), device=where) for _ in WRITES]
            return [*write_all(flat, WRITES, shape), *flat]

        got, wanted = (run(make, where, shape) for where in (device, "cpu"))
        lazytpu.mark_step()
        torch.testing.assert_close([x.cpu() for x in got], wanted, rtol=0, atol=0)


@pytest.mark.parametrize("compiler", [lazytpu.compile, lazytpu.jit, lambda f: torch.compile(f, backend="lazytpu")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
def test_values_in_compiled_functions(compiler: Callable[..., Any], dtype: torch.dtype) -> None:
    shape = (4, 6)
    writes = WRITES if compiler is lazytpu.compile else [w for w in WRITES if w is not as_strided]  # torch refuses it
    given = [contents(shape, dtype) for _ in writes]
    ours = [x.to(device) for x in given]

    @compiler
    def compiled(*flat: Tensor) -> list[Tensor]:
        return write_all([*flat], writes, shape)

    for _ in range(3):
        got = compiled(*ours)
        wanted = write_all(given, writes, shape)
        torch.testing.assert_close([x.cpu() for x in [*got, *ours]], [*wanted, *given], rtol=0, atol=0)


@on_cpu
def test_without_the_guard_values_are_wrong_or_xla_has_mended_it(monkeypatch: pytest.MonkeyPatch) -> None:
    guarded = []
    find = lower.overlapping_writes
    monkeypatch.setattr(lower, "overlapping_writes", lambda graph: guarded.append(find(graph)) or frozenset())
    given = contents((4, 9), torch.float32)
    ours = given.to(device)
    newest_first(ours.view(4, 9))
    lazytpu.mark_step()
    assert [len(nodes) for nodes in guarded] == [2]
    newest_first(given.view(4, 9))
    if torch.equal(ours.cpu(), given):
        pytest.skip("this XLA makes the write right by itself")


def compiled_text() -> str:
    return str(events.compilations[-1].reference().compiled.as_text())


def large_copies(text: str) -> list[str]:
    return [s for s in re.findall(r" = (\S+\[[\d,]+\])\S* copy\(", text) if "128" in s]


def keep(cache: Tensor, new: Tensor, i: int) -> None:
    cache[:, i] = new * new


def grow(cache: Tensor, new: Tensor, i: int) -> None:
    cache[:, 9].mul_(new)


def grow_within(cache: Tensor, new: Tensor, i: int) -> None:
    cache[0][4:8].sub_(1)


@on_cpu
@pytest.mark.parametrize("write", [keep, grow, grow_within])
def test_what_is_right_stays_as_it_is_and_in_place(write: Callable[[Tensor, Tensor, int], None]) -> None:
    cache, new = torch.zeros(2, 128, 8, device=device), torch.randn(2, 8, device=device)
    for i in range(3):
        write(cache, new, i)
        lazytpu.mark_step()
    text = compiled_text()
    assert "conditional(" not in text
    assert not large_copies(text)


@on_cpu
def test_writes_of_the_same_slice_one_after_another_stay_as_they_are() -> None:
    cache = torch.zeros(2, 128, 8, device=device)
    lazytpu.mark_step()
    cache[:, 9].mul_(2).add_(1)
    cache[1].mul_(3)
    cache[0][4:8].sub_(1)
    lazytpu.mark_step()
    assert "conditional(" not in compiled_text()


@on_cpu
def test_what_reads_other_rows_is_in_place_too() -> None:
    history = torch.zeros(128, 16, device=device)
    for _ in range(3):
        history[0] = history[5].flip(0) + 1
        lazytpu.mark_step()
    text = compiled_text()
    assert "conditional(" in text
    assert not large_copies(text)
