"""The hot path is what its commented listing says, and the way of an op stays short."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch

import lazytpu
from lazytpu.dispatch import generated
from lazytpu.ir.op_schema import aten, op_of
from lazytpu.ir.tree import trace
from lazytpu.tracing import record

PACKAGE = str(Path(lazytpu.__file__).parent)
MOST_FILES_OF_A_MISS = 20
MOST_FILES_TO_THE_EXECUTABLE = 65


def test_listing_is_the_generated_source() -> None:
    listing = resources.files("lazytpu.dispatch").joinpath("generated_add_tensor.txt").read_text()
    op = op_of(aten.add.Tensor)
    code = [line.partition("  #")[0].rstrip() for line in listing.splitlines()]
    assert "\n".join(code) + "\n" == generated.source_of(op, generated.functional_lines(op))
    assert all("  # " in line for line in listing.splitlines()), "every line has its comment"


@contextmanager
def files_called() -> Iterator[set[str]]:
    """Collect the files of the package in which a function is called."""
    found: set[str] = set()

    def hook(frame: Any, event: str, _: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith((PACKAGE, "<lazytpu")):
            found.add(name.removeprefix(PACKAGE + "/"))

    sys.setprofile(hook)
    try:
        yield found
    finally:
        sys.setprofile(None)


def test_a_hit_stays_in_the_kernel(device: torch.device) -> None:
    x, y = torch.ones(3, device=device), torch.ones(3, device=device)
    first = x + y
    lazytpu.mark_step()
    x, y = torch.ones(3, device=device), torch.ones(3, device=device)
    with files_called() as files:
        second = torch.add(x, y)
    assert files == {"<lazytpu kernel>"}
    assert first.tolist() == second.tolist() == [2.0] * 3


def test_a_list_of_tensors_and_a_view_are_found_without_binding_arguments(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.arange(6.0).view(2, 3).to(device)

    def step() -> torch.Tensor:
        turned = torch.cat([-x[..., 1:], x[..., :1]], -1)
        lazytpu.mark_step()
        return turned

    first = step()
    calls: list[object] = []
    key = record._key
    monkeypatch.setattr(record, "_key", lambda *given: calls.append(given) or key(*given))
    assert step().tolist() == first.tolist() == [[-1.0, -2.0, 0.0], [-4.0, -5.0, 3.0]]
    assert not calls
    assert torch.cat([x, torch.empty(0, device=device)]).shape == (2, 3)
    with pytest.raises(RuntimeError, match="same device"):
        torch.cat([x, torch.ones(1, 3)])


def test_a_miss_passes_few_files(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazytpu.config, "disk_cache", False)
    x, y = (torch.ones(3, 17).to(device) for _ in range(2))
    lazytpu.mark_step()
    trace.forget_paths()  # there is nothing to diverge from
    torch.add(torch.empty(1, device="meta"), 1)  # what torch imports at first is no part of the way
    with files_called() as files:
        z = torch.add(x, y)
    assert "tracing/record.py" in files and len(files) <= MOST_FILES_OF_A_MISS, sorted(files)
    with files_called() as more:
        lazytpu.mark_step()
    more -= {file for file in more if file.startswith("compat/")}  # observers of a shim that another test imported
    assert "lowering/rules/pointwise.py" in more and len(files | more) <= MOST_FILES_TO_THE_EXECUTABLE, sorted(more)
    assert z.sum().item() == 102.0
