"""What the program wrote where a tensor becomes a Python number is named."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

import lazytpu
from lazytpu.diagnosis import events
from lazytpu.location import conversion


def test_conversions_and_conditions(device: torch.device) -> None:
    x = torch.ones(()).to(device)

    def asked(read: Callable[[], object]) -> list[str]:
        lazytpu.metrics.reset()
        read()
        return [what for found in (events.cuts, events.reads) for what, _ in found]

    def statements() -> None:
        while x.sinh() < 0:
            pass
        assert x.sinh()

    assert asked(lambda: x.sinh().item()) == ["item"]
    assert asked(lambda: [float(x.sinh()), int(x.sinh()), bool(x.sinh())]) == ["float", "int", "bool"]
    assert asked(lambda: round(float(x.sinh() + 1))) == ["float"]
    assert asked(lambda: 1 if x.sinh() else 2) == ["bool (if)"]
    assert asked(lambda: not x.sinh()) == ["bool (not)"]
    assert asked(statements) == ["bool (while)", "bool (assert)"]
    assert asked(lambda: (5, 6)[x.long() - 1]) == ["int (index)"]
    assert asked(lambda: f"{x.sinh():.2f}") == ["item (by format)"]
    assert asked(lambda: range(x.long() + 2)) == ["item (by range)"]
    assert asked(lambda: exec("bool(x.sinh())", {"x": x})) == [conversion.UNKNOWN], "there is no source"
    assert asked(lambda: exec("if x.sinh(): pass", {"x": x})) == ["bool"]


def test_condition_inside_torch(device: torch.device) -> None:
    w = torch.ones(3, device=device).requires_grad_()
    w.grad = torch.ones(3, device=device)
    lazytpu.metrics.reset()
    nn.utils.clip_grad_norm_([w], 1.0, error_if_nonfinite=True)
    assert [what for what, _ in (*events.cuts, *events.reads)] == ["bool (if) inside torch"]
