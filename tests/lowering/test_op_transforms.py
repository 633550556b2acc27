"""Second derivatives, forward-mode derivatives and vmap of torch's operators, on a fixed part of them.

`sweep.py` checks these on all of them.  Several operators share a graph, for the time goes into compiling.
"""

from __future__ import annotations

import zlib
from typing import Any

import pytest
import torch

import lazytpu
from tests.support.op_checks import CHECK_OF, ENTRIES, error_of, full_name, samples_of
from tests.support.op_status import known

pytestmark = pytest.mark.filterwarnings("ignore")  # those of torch's own samples

PART = 8  # one in so many operators
GROUPS = 6


def group_of(op: Any, check: str) -> int:
    """Which group of a check an operator belongs to; past `GROUPS` it is in none."""
    return zlib.crc32(f"{check} {full_name(op)}".encode()) % (GROUPS * PART)


@pytest.mark.parametrize("group", range(GROUPS))
@pytest.mark.parametrize("check", ["gradgrad", "jvp", "vmap"])
def test_transforms_of_operators(check: str, group: int, device: torch.device) -> None:
    texts, compares = [], []
    for op in ENTRIES:
        if torch.float32 not in op.dtypes or group_of(op, check) != group:
            continue
        if known(full_name(op), check, torch.float32) is not None:  # the sweep sees to it that these fail
            continue
        for sample in samples_of(op, torch.float32, op.supports_autograd)[:1]:
            made, error = error_of(CHECK_OF[check], op, sample, device)
            compares += [(full_name(op), compare) for compare in made or ()]
            if error is not None:
                texts.append(f"{full_name(op)}: {type(error).__name__}: {error}")
    assert compares
    lazytpu.mark_step()
    texts += [f"{name}: {text}" for name, compare in compares for text in compare()]
    assert not texts, "\n".join(texts)
