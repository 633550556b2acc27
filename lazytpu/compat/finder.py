"""How ``import torch_xla`` finds its stand-in."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

from lazytpu.compat import lacking

PACKAGES = ("torch_xla", "torch_tpu", "torch_mlu")


def install(package: str) -> None:
    """Makes ``import package``, and of its submodules, find the stand-in; a second call changes nothing.

    Args:
        package: ``torch_xla``, ``torch_tpu`` or ``torch_mlu``.

    Raises:
        ValueError: there is no stand-in for it.
        ImportError: the package itself has been imported already.
    """
    if package not in PACKAGES:
        raise ValueError(f"lazytpu.compat has {', '.join(PACKAGES)}, not {package!r}")
    loaded = sys.modules.get(package)
    ours = f"lazytpu.compat.{package}"
    if loaded is not None and loaded.__name__ != ours:
        raise ImportError(f"{package} is imported already, from {getattr(loaded, '__file__', '?')}")
    if not any(isinstance(finder, _Finder) and finder.package == package for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(package))
    importlib.import_module(package)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the modules of one package below `lazytpu.compat`."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] != self.package:
            return None
        if importlib.util.find_spec(f"lazytpu.compat.{name}") is None:
            raise ModuleNotFoundError(lacking.message(name), name=name)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(f"lazytpu.compat.{spec.name}")
        self._own = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """The module has run; only its name and origin, which the import system has just changed, are put back."""
        module.__spec__ = self._own
