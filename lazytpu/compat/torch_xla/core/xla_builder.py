"""``torch_xla.core.xla_builder``: what it has for HLO that was made elsewhere."""

from __future__ import annotations

import importlib
from typing import Protocol

from lazytpu.compat import names

__getattr__ = names.missing_from(__name__)


class Computation(Protocol):
    """A module of HLO."""

    def as_hlo_text(self) -> str: ...
    def as_serialized_hlo_module_proto(self) -> bytes: ...


def computation_from_module_proto(name: str, proto: bytes) -> Computation:
    """Return the module that ``LoweringContext.hlo()`` has given, under the name that it has."""
    found: Computation = importlib.import_module("jaxlib._hlo").XlaComputation(proto)
    return found


def get_computation_hlo(computation: Computation) -> str:
    """Return a module as text."""
    return computation.as_hlo_text()
