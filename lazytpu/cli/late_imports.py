"""Catch imports of a package with a shim that only running the script shows: by a plugin, a pickle, a computed name.

The device's name is fixed by then.  As long as the device has not been used, the script starts again with the name that
it expects; afterwards the device keeps its name, and a warning says so.
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
from lazytpu.cli import shims
from lazytpu.config import config
from lazytpu.ir.tree import trace

_STANDARD = os.path.realpath(sysconfig.get_path("stdlib")) + os.sep
_OURS = os.path.dirname(os.path.realpath(lazytpu.__file__)) + os.sep


class Watch(importlib.abc.MetaPathFinder):
    """Waits for imports of packages that have a shim, by the script's own modules.

    A library that asks whether such a package is installed is told that it is not, as without lazytpu.
    """

    def __init__(self, known: list[shims.Shim], folders: list[str]) -> None:
        self._waiting = {name: shim for name, shim in shims.SHIMS.items() if shim not in known}
        self._folders, self._process = folders, os.getpid()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        shim = self._waiting.get(name.partition(".")[0])
        importer = _importer() if shim is not None else None
        if shim is None or not (importer is None or shims.is_own(importer.f_code.co_filename, self._folders)):
            return None
        at = f"{os.path.basename(importer.f_code.co_filename)}:{importer.f_lineno}" if importer else self._folders[0]
        self._name_device(shim, at)
        del self._waiting[shim.package]
        shims.install([shim])
        found = (f.find_spec(name, path, target) for f in list(sys.meta_path) if f is not self)
        return next((spec for spec in found if spec is not None), None)

    def _name_device(self, shim: shims.Shim, at: str) -> None:
        """Start the script again with the device's right name, or say why the name stays."""
        if not shims.wants_another_name([shim]):
            return
        in_main = os.getpid() == self._process and threading.current_thread() is threading.main_thread()
        fix = f"use --compat {shim.package} to call it {shim.device_name} from the start"
        if in_main and not lazytpu.metrics.counters() and not trace.cursor.depth:
            print(f"lazytpu run: {at} imports {shim.package}; starting the script again; {fix}", file=sys.stderr)
            shims.rename_device([shim])
        print(
            f"lazytpu run: {at} imports {shim.package}; the device is in use and stays {config.device_name}; {fix}",
            file=sys.stderr,
        )


def watch(known: list[shims.Shim], target: str, is_module: bool) -> None:
    """Wait for imports of the packages whose shims are not known to be needed."""
    sys.meta_path.insert(0, Watch(known, shims.own_folders(target, is_module)))


def _importer() -> FrameType | None:
    """Return the innermost frame whose code belongs neither to Python, nor to lazytpu, nor to a string."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        full = os.path.realpath(file)
        if not file.startswith("<") and (not full.startswith((_STANDARD, _OURS)) or "site-packages" in full):
            return frame
        frame = frame.f_back
    return None
