"""Keep the first op from importing Dynamo, which takes a second or two and serves only ``torch.compile``.

Torch shields the Python functions behind its meta kernels from being compiled (``_disable_dynamo``), and the
shield imports Dynamo when it is first called.  There is nothing to shield them from before Dynamo is imported, so until
then they are called directly; from then on as torch wants it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import CellType, FunctionType, ModuleType

from torch._compile import _disable_dynamo
from torch._decomp import global_decomposition_table

from lazytpu.torch_backend.after_import import after_import

_EMPTY = CellType()
_SHIELD = "__dynamo_disable"  # where `_disable_dynamo` keeps what it calls


def open_until_dynamo_comes() -> None:
    """Let torch's meta functions be called without Dynamo."""
    if "torch._dynamo" in sys.modules:
        return
    opened = list(_shielded())
    for function in opened:
        setattr(function, _SHIELD, function)

    def close(dynamo: ModuleType) -> None:
        for function in opened:
            if function.__dict__.get(_SHIELD) is function:
                delattr(function, _SHIELD)

    after_import("torch._dynamo", close)


def _shielded() -> Iterator[Callable[..., object]]:
    """Yield the functions behind the meta kernels that are shielded."""
    shield = _disable_dynamo(lambda: None).__code__
    seen: set[FunctionType] = set()
    open_ = [f for table in global_decomposition_table.values() for f in table.values() if type(f) is FunctionType]
    while open_:
        function = open_.pop()
        if function in seen:
            continue
        seen.add(function)
        inside = [cell.cell_contents for cell in function.__closure__ or () if cell != _EMPTY]
        wrapped = [f for f in inside if type(f) is FunctionType]  # `__wrapped__` may be another function
        open_ += wrapped
        if function.__code__ is shield:
            yield from wrapped
