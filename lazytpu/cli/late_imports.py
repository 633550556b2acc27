"""Another package's import that shows only while the script runs: by a plugin, a pickle, a name put together.

The device's name is fixed by then.  As long as the device has not been used, the script is started again with
the name it expects; afterwards the device keeps its name, and a warning says so.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import sysconfig
import threading
from collections.abc import Sequence
from types import FrameType, ModuleType

import lazytpu
from lazytpu.cli import imports, shims
from lazytpu.config import config
from lazytpu.ir.tree import trace

_STANDARD = os.path.realpath(sysconfig.get_path("stdlib")) + os.sep
_OURS = os.path.dirname(os.path.realpath(lazytpu.__file__)) + os.sep


class Watch(importlib.abc.MetaPathFinder):
    """Waits for imports of packages that have a stand-in, by the script's own modules.

    A library that asks whether such a package is installed is told that it is not, as without lazytpu.

    Attributes:
        waiting: package to layer, those that are not installed yet.
    """

    def __init__(self, known: list[shims.Layer], places: list[str]) -> None:
        self.waiting = {name: layer for name, layer in shims.LAYERS.items() if layer not in known}
        self._places, self._process = places, os.getpid()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        layer = self.waiting.get(name.partition(".")[0])
        asks = _who_asks() if layer is not None else None
        if layer is None or not (asks is None or imports.is_own(asks.f_code.co_filename, self._places)):
            return None
        where = f"{os.path.basename(asks.f_code.co_filename)}:{asks.f_lineno}" if asks else self._places[0]
        self._name_device(layer, where)
        del self.waiting[layer.package]
        shims.install([layer])
        found = (f.find_spec(name, path, target) for f in list(sys.meta_path) if f is not self)
        return next((spec for spec in found if spec is not None), None)

    def _name_device(self, layer: shims.Layer, where: str) -> None:
        """Starts the script again with the device's right name, or says why the name stays."""
        if not shims.wants_another_name([layer]):
            return
        here = os.getpid() == self._process and threading.current_thread() is threading.main_thread()
        spare = f"run it with --compat {layer.package} to have it called {layer.device_name} from the start"
        if here and not lazytpu.metrics.counters() and not trace.cursor.depth:
            print(f"lazytpu run: {where} imports {layer.package}; starting again; {spare}", file=sys.stderr)
            shims.rename_device([layer])
        print(
            f"lazytpu run: {where} imports {layer.package}; the device stays {config.device_name} by now; {spare}",
            file=sys.stderr,
        )


def watch(known: list[shims.Layer], target: str, is_module: bool) -> None:
    """Waits for imports of the packages that are not among those known to be needed."""
    sys.meta_path.insert(0, Watch(known, imports.places_of(target, is_module)))


def _who_asks() -> FrameType | None:
    """The frame of the innermost code that belongs neither to Python, nor to lazytpu, nor to a string."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        full = os.path.realpath(file)
        if not file.startswith("<") and (not full.startswith((_STANDARD, _OURS)) or "site-packages" in full):
            return frame
        frame = frame.f_back
    return None
