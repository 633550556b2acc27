"""Find out which shim of `lazytpu.compat` a script needs, before anything of the script runs.

A script that imports ``torch_xla`` is written for another package's device.  ``run`` installs the shim for the package
and gives the device the name that the script expects.  Imports are read from the source of the script and of its own
modules; `lazytpu.cli.late_imports` catches those that only running it shows.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
from dataclasses import dataclass
from modulefinder import Module, ModuleFinder
from pathlib import Path
from typing import IO

from lazytpu import compat
from lazytpu.config import config


@dataclass(frozen=True, slots=True)
class Shim:
    """A package that `lazytpu.compat` has a shim for.

    Attributes:
        package: its top-level name, also the name that ``lazytpu.compat.install`` takes.
        device_name: what its scripts call the device.
    """

    package: str
    device_name: str


SHIMS = {shim.package: shim for shim in (Shim("torch_xla", "xla"), Shim("torch_mlu", "mlu"), Shim("torch_tpu", "tpu"))}
_VARIABLE = "LAZYTPU_DEVICE_NAME"
_INSTALLED = ("site-packages", "dist-packages")
_environment, _folder = dict(os.environ), os.getcwd()  # as they were before the script


def own_folders(target: str, is_module: bool) -> list[str]:
    """Return the folders below which a script's own modules lie: its own and the current one."""
    folder = Path() if is_module else Path(target) if os.path.isdir(target) else Path(target).parent
    return list(dict.fromkeys([os.path.realpath(folder), os.path.realpath(os.curdir)]))


def is_own(file: str, folders: list[str]) -> bool:
    """Return whether a file lies below one of the folders, and is no installed package."""
    full = Path(os.path.realpath(file))
    return any(full.is_relative_to(folder) for folder in folders) and not any(p in full.parts for p in _INSTALLED)


class _Finder(ModuleFinder):
    """Follows imports into modules of the given folders; those of other packages are missing."""

    def find_module(
        self,
        name: str,
        path: str | None,
        parent: Module | None = None,  # in fact a list of folders
    ) -> tuple[IO[str] | None, str | None, tuple[str, str, int]]:
        spec = importlib.machinery.PathFinder.find_spec(name, path or self.path)
        if name == "lazytpu" or spec is None or spec.origin is None:  # without an origin: a plain folder of that name
            raise ImportError(name)
        return super().find_module(name, path, parent)


def needed_by(target: str, is_module: bool = False) -> list[Shim]:
    """Return the shims for packages that a script, or a module of its own, imports, in order of appearance.

    Args:
        target: a file, a folder with ``__main__.py``, or the name of a module.
        is_module: whether it is a module's name.
    """
    finder = _Finder(own_folders(target, is_module))
    main = os.path.join(target, "__main__.py") if os.path.isdir(target) else target
    try:
        if is_module:
            finder.import_hook(target)
            finder.import_hook(f"{target}.__main__")
        else:
            finder.run_script(main)
    except Exception:  # a syntax error, or no source: running the script says what is wrong
        pass
    missing = dict.fromkeys(name.partition(".")[0] for name in finder.badmodules)
    return [SHIMS[name] for name in missing if name in SHIMS]


def wants_another_name(shims: list[Shim]) -> bool:
    """Return whether a shim's scripts call the device by another name than its own, which the user has not set."""
    return any(shim.device_name != config.device_name for shim in shims) and _VARIABLE not in _environment


def rename_device(shims: list[Shim]) -> None:
    """Start this process again with the device's name in the environment, if a shim wants another name.

    The name is fixed when lazytpu is imported, which has already happened.  A name that the user set stays.
    """
    if not wants_another_name(shims):
        return
    wanted = next(shim.device_name for shim in shims if shim.device_name != config.device_name)
    sys.stdout.flush()
    sys.stderr.flush()
    os.chdir(_folder)
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**_environment, _VARIABLE: wanted})


def install(shims: list[Shim]) -> None:
    """Make ``import torch_xla`` and the like find the shims."""
    for shim in shims:
        compat.install(shim.package)
