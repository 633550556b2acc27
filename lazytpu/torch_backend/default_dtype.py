"""torch.set_default_dtype: the dtype of ``torch.ones(3)`` is not among its arguments, so each default has a tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lazytpu.ir.tree import trace
from lazytpu.tracing import cutting, record


def register() -> None:
    """Notice when torch changes its default; called once."""
    trace.root_name = torch.get_default_dtype()
    for name in ("_set_default_dtype", "_set_default_tensor_type"):
        setattr(torch._C, name, _noticed(getattr(torch._C, name)))


def _noticed(change: Callable[[object], None]) -> Callable[[object], None]:
    def call(given: Any) -> None:
        with record.lock:
            if given is torch.get_default_dtype():
                return
            if trace.inputs or trace.pending or trace.cursor.depth:
                cutting.cut("set_default_dtype")
            try:
                change(given)
            finally:
                trace.change_root(torch.get_default_dtype())

    return call
