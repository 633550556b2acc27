"""Compatibility layers: which one a script needs, found before anything of the script runs.

A script that imports ``torch_xla`` is written for another package's device.  ``run`` installs the layer
that stands in for it (`lazytpu.compat`) and gives the device the name the script expects.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lazytpu.config import config


@dataclass(frozen=True, slots=True)
class Layer:
    """A package that `lazytpu.compat` can stand in for.

    Attributes:
        package: its top-level name, also the name ``lazytpu.compat.install`` takes.
        device_name: what its scripts call the device.
    """

    package: str
    device_name: str


LAYERS = {
    layer.package: layer for layer in (Layer("torch_xla", "xla"), Layer("torch_mlu", "mlu"), Layer("torch_tpu", "tpu"))
}
_VARIABLE = "LAZYTPU_DEVICE_NAME"


def layers_of(script: Path) -> list[Layer]:
    """The layers that a script, or a module beside it that it imports, asks for, in order of appearance."""
    found: dict[str, Layer] = {}
    seen: set[Path] = set()
    waiting = [script]
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        for name in imported_names(path):
            package = name.partition(".")[0]
            if package in LAYERS:
                found[package] = LAYERS[package]
            waiting += _beside(script.parent, name)
    return list(found.values())


def imported_names(path: Path) -> Iterator[str]:
    """The absolute names of the modules that the import statements of a file name; none where it is not Python."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):  # running it will say what is wrong
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module


def _beside(folder: Path, name: str) -> list[Path]:
    """The file of a module that lies beside the script."""
    base = folder.joinpath(*name.split("."))
    return [path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()]


def rename_device(layers: list[Layer]) -> None:
    """Starts this process again with the device's name in the environment, if a layer wants another name.

    The name is fixed when lazytpu is imported, which has happened by now.  A name that the user set stays.
    """
    wanted = [layer.device_name for layer in layers if layer.device_name != config.device_name]
    if not wanted or _VARIABLE in os.environ:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, _VARIABLE: wanted[0]})


def available(layers: list[Layer]) -> list[Layer]:
    """Those of the layers that this lazytpu has; the script's imports of the others are its own business."""
    return layers if importlib.util.find_spec("lazytpu.compat") is not None else []


def install(layers: list[Layer]) -> None:
    """Makes ``import torch_xla`` and the like find the layers."""
    for layer in layers:
        importlib.import_module("lazytpu.compat").install(layer.package)
