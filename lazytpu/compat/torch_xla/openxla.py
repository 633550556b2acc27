"""``torch.compile(backend="openxla")``, which torch has for torch_xla: here it is ``backend="lazytpu"``."""

from __future__ import annotations

from types import ModuleType

from lazytpu.frontends.dynamo import backend
from lazytpu.torch_backend.after_import import after_import

_NAMES = ("openxla", "openxla_eval")


def register() -> None:
    """Replace the backends that torch registers under torch_xla's names by lazytpu's, once they are registered."""
    after_import("torch._dynamo.backends.torchxla", _replace)


def _replace(theirs: ModuleType) -> None:
    registered = vars(theirs)["register_backend"].__globals__["_COMPILER_FNS"]
    registered.update(dict.fromkeys(_NAMES, backend))
