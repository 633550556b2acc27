"""A forked child process cannot use the device: XLA's threads do not exist there, and waiting for them
would never end.  Every op raises `ForkError` there at once.

The hot path pays nothing: in the child, what each op looks at first (the trace's step and cursor, and jax
in runtime/) is replaced by an object that raises whatever is asked of it.
"""

from __future__ import annotations

import os
from typing import Any, NoReturn

from lazytpu.errors import ForkError
from lazytpu.ir.tree import trace
from lazytpu.runtime import client, compiler, launch, transfers
from lazytpu.tracing import record

_home_process = os.getpid()


class _Forbidden:
    """Raises whatever is asked of it."""

    def _refuse(self, *_: object) -> NoReturn:
        raise ForkError(
            "the device cannot be used in a forked child process",
            given=f"process {os.getpid()}, forked from {_home_process}",
            fix='keep to the CPU there (as DataLoader workers do), or multiprocessing.set_start_method("spawn")',
        )

    __getattr__ = __eq__ = __ne__ = __lt__ = __gt__ = __add__ = __sub__ = _refuse
    __hash__ = None  # type: ignore[assignment]


def in_child() -> bool:
    """Return whether this process was forked from the one that imported lazytpu."""
    return os.getpid() != _home_process


def _forbid() -> None:
    record.lock._at_fork_reinit()  # type: ignore[attr-defined] # its owner may be a thread that is gone
    forbidden: Any = _Forbidden()
    trace.step = trace.cursor = trace.root = forbidden
    for module in (client, compiler, launch, transfers):
        vars(module)["jax"] = forbidden


def register() -> None:
    """Make every child of ``os.fork`` refuse the device."""
    os.register_at_fork(after_in_child=_forbid)
