"""Make ``import torch_xla`` find its shim."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType

from lazytpu.compat import names

PACKAGES = ("torch_xla", "torch_tpu", "torch_mlu")


def install(package: str) -> None:
    """Make ``import package``, and of its submodules, find the shim; a second call changes nothing.

    Args:
        package: ``torch_xla``, ``torch_tpu`` or ``torch_mlu``.

    Raises:
        ValueError: there is no shim for it.
        ImportError: the package itself is already imported.
    """
    if package not in PACKAGES:
        raise ValueError(f"there is no shim for {package!r}, only for {', '.join(PACKAGES)}")
    loaded = sys.modules.get(package)
    ours = f"lazytpu.compat.{package}"
    if loaded is not None and loaded.__name__ != ours:
        raise ImportError(f"{package} is already imported from {getattr(loaded, '__file__', '?')}")
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
            raise ModuleNotFoundError(names.message(name), name=name)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = importlib.import_module(f"lazytpu.compat.{spec.name}")
        self._own = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's name and origin, which the import system has just changed; the module has run."""
        module.__spec__ = self._own
