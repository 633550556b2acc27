"""Copies and conversions of dtype, complex and real views, bit casts."""

from __future__ import annotations

import torch

from lazytpu.lowering.registry import lowers, lowers_each
from lazytpu.lowering.rules.operands import cast, operand

aten = torch.ops.aten


def _same(out, x, **_):
    return x


lowers_each(
    {
        aten._to_copy.default: lambda out, x, **_: cast(x, out.dtype),
        aten.clone.default: _same,
        aten.lift_fresh_copy.default: _same,
        aten.lift.default: _same,
        aten.lift_fresh.default: _same,
    }
)


@lowers(aten.copy.default)
def copy(out, x, source, non_blocking=False):
    return operand(source, out, out.dtype)
