"""More compilations than ``max_compiles`` raise or warn, with the cause."""

from __future__ import annotations

import warnings

import pytest
import torch

import lazytpu
from lazytpu.diagnosis import events
from lazytpu.errors import CompileBudgetError
from tests.support.explanations import Explanations

explained = Explanations(__file__)

BUDGET = """\
2 graphs were compiled; lazytpu.config.max_compiles is 1
  at    [use]
  with  diverges from graph 1 at op 1 (aten.sinh), argument 'self': input %p0 was f32[2,3] and is f32[2,4]: \
dimension 1 changed; `x`, moved to the device at [moved]; 2 types seen here: f32[2,3], f32[2,4]
  fix   pad it to one of a few sizes, and mask the padding"""


def compile_twice(device: torch.device) -> None:
    for n in (3, 4):
        x = torch.ones(2, n).to(device)  # [moved]
        y = x.sinh()  # [use]
        lazytpu.mark_step()
        del y


def test_budget_raises_with_the_cause(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazytpu.config, "max_compiles", 1)
    with pytest.raises(CompileBudgetError) as raised:
        compile_twice(device)
    assert explained.marked(str(raised.value)) == BUDGET
    monkeypatch.setattr(lazytpu.config, "max_compiles", 0)
    lazytpu.mark_step()


def test_budget_warns_at_the_line(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazytpu.config, "max_compiles", 1)
    monkeypatch.setattr(lazytpu.config, "max_compiles_action", "warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compile_twice(device)
    (warning,) = [w for w in caught if issubclass(w.category, events.CompileBudgetWarning)]
    assert explained.marked(str(warning.message)) == BUDGET
    assert warning.filename == __file__ and explained.lines[warning.lineno - 1].endswith("# [use]")
