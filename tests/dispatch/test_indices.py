"""Masks and indices of both devices: what is read and written is what the CPU reads and writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lazytpu

ALL = slice(None)
THREE, FOUR, FIVE = (torch.tensor(x).bool() for x in ([1, 0, 1], [1, 0, 1, 1], [1, 0, 0, 0, 1]))
TABLE = torch.tensor([[1, 0, 1, 0], [0, 0, 1, 0], [0, 1, 1, 1]]).bool()
WHOLE = torch.arange(60).reshape(3, 4, 5) % 7 == 0
PLACES = torch.tensor([0, 2])

CASES: list[tuple[tuple[Any, ...], tuple[int, ...]]] = [
    *[((THREE,), shape) for shape in ((2, 4, 5), (4, 5), (1, 4, 5), (2, 1, 5), (3, 4, 5), (), (5,))],
    *[((TABLE,), shape) for shape in ((6, 5), (5,), (6, 1))],
    *[((WHOLE,), shape) for shape in ((9,), (1,))],
    *[((ALL, FOUR), shape) for shape in ((3, 3, 5), (3, 1, 5), (3, 5))],
    *[((ALL, ALL, FIVE), shape) for shape in ((3, 4, 2), (2,), (4, 1))],
    *[((THREE, ALL, FIVE), shape) for shape in ((2, 4), (4,))],
    *[((THREE, PLACES), shape) for shape in ((2, 5), (5,))],
    ((PLACES, FOUR), (3, 5)),
    ((ALL, PLACES), (3, 2, 5)),
    ((PLACES, ALL, torch.tensor(1)), (4,)),
    *[((THREE, FIVE), shape) for shape in ((2, 5), ())],  # FIVE is of another size than what it indexes
    *[((ALL, TABLE), shape) for shape in ((3, 6), ())],
]


def wrote(x: torch.Tensor, index: tuple[Any, ...], values: torch.Tensor) -> torch.Tensor | type:
    try:
        x[index] = values
    except (RuntimeError, IndexError) as error:
        return type(error)
    return x.cpu()


@pytest.mark.parametrize("indices_on", ["device", "cpu"])
def test_what_is_written_through_masks(indices_on: str, device: torch.device) -> None:
    x = torch.arange(60.0).reshape(3, 4, 5)
    for index, shape in CASES:
        values = torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)
        moved = tuple(
            i.to(device) if indices_on == "device" and isinstance(i, torch.Tensor) and i.dim() else i for i in index
        )
        want, got = wrote(x.clone(), index, values), wrote(x.to(device), moved, values.to(device))
        assert type(want) is type(got), (index, shape, got)
        assert want is got if isinstance(want, type) else torch.equal(want, got), (index, shape)


def test_indices_on_the_cpu_are_moved(device: torch.device) -> None:
    x = torch.arange(12.0).reshape(3, 4)
    leaves = [x.clone().requires_grad_(), x.to(device).requires_grad_()]
    for leaf in leaves:
        (leaf[PLACES] ** 2).sum().backward()
    assert torch.equal(leaves[1].grad.cpu(), leaves[0].grad)
    with pytest.raises(RuntimeError, match="same device"):
        x[PLACES.to(device)]
    with pytest.raises(RuntimeError, match="same device"):
        leaves[1].index_select(0, PLACES)
    with pytest.raises(RuntimeError, match="same device"):
        leaves[1].detach()[PLACES] = torch.ones(2, 4)


def test_a_mask_with_one_row_for_all_reads_nothing(device: torch.device) -> None:
    x, mask = torch.zeros(3, 4, device=device), THREE.to(device)
    lazytpu.mark_step()
    cuts = lazytpu.metrics.counter("cut")
    x[mask] = 1.0
    x[mask] = torch.arange(4.0, device=device)
    assert lazytpu.metrics.counter("cut") == cuts
    x[mask] = torch.ones(2, 4, device=device)
    assert x.sum().item() == 8


def test_places_of_nothing_lie_as_on_the_cpu(device: torch.device) -> None:
    x = torch.zeros(3, 4)
    assert x.to(device).nonzero().stride() == x.nonzero().stride()
