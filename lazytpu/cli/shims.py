"""Compatibility layers: which one a script needs, found before anything of the script runs.

A script that imports ``torch_xla`` is written for another package's device.  ``run`` installs the layer
that stands in for it (`lazytpu.compat`) and gives the device the name the script expects.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from lazytpu.cli.imports import Imports
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
_environment, _folder = dict(os.environ), os.getcwd()  # as they were before the script


def layers_of(script: str | Path, is_module: bool = False) -> list[Layer]:
    """The layers that a script, or a module of its own that it imports, asks for, in order of appearance.

    Args:
        script: a file, a folder or zip with ``__main__.py``, or the name of a module.
        is_module: whether it is a module's name.
    """
    packages = (name.partition(".")[0] for name in Imports(str(script), is_module).names())
    return [LAYERS[package] for package in dict.fromkeys(packages) if package in LAYERS]


def wants_another_name(layers: list[Layer]) -> bool:
    """Whether a layer calls the device otherwise than it is called, and the user has not set its name."""
    return any(layer.device_name != config.device_name for layer in layers) and _VARIABLE not in _environment


def rename_device(layers: list[Layer]) -> None:
    """Starts this process again with the device's name in the environment, if a layer wants another name.

    The name is fixed when lazytpu is imported, which has happened by now.  A name that the user set stays.
    """
    if not wants_another_name(layers):
        return
    wanted = next(layer.device_name for layer in layers if layer.device_name != config.device_name)
    sys.stdout.flush()
    sys.stderr.flush()
    os.chdir(_folder)
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**_environment, _VARIABLE: wanted})


def available(layers: list[Layer]) -> list[Layer]:
    """Those of the layers that this lazytpu has; the script's imports of the others are its own business."""
    return layers if importlib.util.find_spec("lazytpu.compat") is not None else []


def install(layers: list[Layer]) -> None:
    """Makes ``import torch_xla`` and the like find the layers."""
    for layer in layers:
        importlib.import_module("lazytpu.compat").install(layer.package)
