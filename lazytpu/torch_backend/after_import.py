"""Does something right after a module of another package is imported, whenever that is.

``torch._dynamo`` takes a second to import and most programs never use it, so what has to be said to it waits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

Action = Callable[[ModuleType], None]


class _AfterImport(MetaPathFinder):
    """Finds the modules it waits for as Python does, with a loader that calls the action afterwards."""

    def __init__(self) -> None:
        self.actions: dict[str, Action] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.actions:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.actions[name])
        return spec


class _Loader(Loader):
    """Another loader, and an action after it."""

    def __init__(self, loader: Loader, action: Action) -> None:
        self._loader, self._action = loader, action

    def __getattr__(self, name: str) -> object:  # get_source and others, for tracebacks
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._action(module)


_finder = _AfterImport()


def after_import(name: str, action: Action) -> None:
    """Call ``action`` with the module of that name: now if it is imported, else once it is."""
    if name in sys.modules:
        action(sys.modules[name])
        return
    _finder.actions[name] = action
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
