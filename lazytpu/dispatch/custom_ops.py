"""Ops of other namespaces than aten: ``torch.library.custom_op``, torchvision's, and whatever else is registered.

One that has a lowering rule is recorded like any other.  One written in torch ops for any device is recorded op by
op, by torch itself.  One that has a kernel for the CPU only runs there, with a warning.
"""

from __future__ import annotations

from typing import Any

import torch

from lazytpu.dispatch.cpu_fallback import fallback
from lazytpu.dispatch.general import functional
from lazytpu.ir.op_schema import OpOverload
from lazytpu.observers import Observer, add

_KEY = "PrivateUse1"
_libraries: dict[str, torch.library.Library] = {}
_fallbacks: dict[OpOverload, Any] = {}


def register() -> None:
    """Catch ops without a kernel for the device, and wait for rules."""
    _libraries["_"] = torch.library.Library("_", "IMPL")
    _libraries["_"].fallback(_on_host, _KEY)
    add(_NewRules())


class _NewRules(Observer):
    """Gives a custom op its kernel when it gets a rule."""

    def rule_registered(self, op: object) -> None:
        _add_kernel(op)


def _add_kernel(op: object) -> None:
    """Return the kernel of a custom op that was given a rule."""
    if not isinstance(op, OpOverload) or op.namespace in ("aten", "prims", "lazytpu"):  # they have their kernels
        return
    if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), _KEY):
        return
    if op._schema.is_mutable:
        raise ValueError(
            f"{op} writes to its arguments; a rule computes new values: give one to an op that returns them, "
            "and copy in the function that calls it"
        )
    library = _libraries.get(op.namespace)
    if library is None:
        library = _libraries[op.namespace] = torch.library.Library(op.namespace, "IMPL")
    library.impl(op.name().partition("::")[2], functional(op), _KEY)


def _on_host(op: OpOverload, *args: Any, **kwargs: Any) -> object:
    """Run an op that has no kernel for the device on the CPU, with a warning."""
    if op.namespace == "aten":  # torch composes those of others, or they make no sense here
        raise NotImplementedError(
            f"Could not run '{op._schema.name}' with arguments from the '{torch._C._get_privateuse1_backend_name()}' "
            "backend"
        )
    if op not in _fallbacks:
        _fallbacks[op] = fallback(op)
    return _fallbacks[op](*args, **kwargs)
