"""Load the safetensors files of a Hugging Face folder straight into the parts that devices have."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from lazytpu.spmd.tensor_parts import Box, fill
from lazytpu.tracing.record import is_device_tensor


class _Slice(Protocol):
    def __getitem__(self, box: Box) -> torch.Tensor: ...


class _File(Protocol):
    def get_tensor(self, name: str) -> torch.Tensor: ...


_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


def load_safetensors(
    module: nn.Module,
    folder: str | os.PathLike[str],
    *,
    rename: Callable[[str], str] = str,
    strict: bool = True,
) -> list[str]:
    """Load parameters and buffers from the files of a Hugging Face folder.

    Of each file only the parts that devices of this process have are read, one at a time: the host never holds a whole
    tensor that is split.

    Args:
        module: on the device, split over a mesh or not; tensors on the CPU are loaded, too.
        folder: with ``model.safetensors``, or several files and ``model.safetensors.index.json``.
        rename: gives the name in the files for one of the module.
        strict: raise where the files lack a name; else such tensors stay as they are.

    Returns:
        The names of the module that were not found.

    Raises:
        KeyError: ``strict``, and a name is not there.
        ValueError: a tensor has other sizes.
        FileNotFoundError: the folder has no such file.
    """
    safe_open = importlib.import_module("safetensors").safe_open
    files = _files(Path(folder))
    missing = []
    for tensor, names in _tensors(module):
        name = next((n for n in names if rename(n) in files), None)
        if name is None:
            missing.append(names[0])
            continue
        file = files[rename(name)]
        with safe_open(file, framework="pt") as opened:
            part = opened.get_slice(rename(name))
            if tuple(part.get_shape()) != tuple(tensor.shape):
                raise ValueError(f"{name} is {tuple(tensor.shape)}, in {file.name} {tuple(part.get_shape())}")
            _load(tensor, part, opened, rename(name))
    if missing and strict:
        raise KeyError(f"{folder} has no {', '.join(missing)}")
    return missing


def _tensors(module: nn.Module) -> list[tuple[torch.Tensor, list[str]]]:
    """Return each tensor with its names: tied weights have several, of which files have one or all."""
    found: dict[int, tuple[torch.Tensor, list[str]]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), (tensor, []))[1].append(name)
    return [*found.values()]


def _load(tensor: torch.Tensor, part: _Slice, opened: _File, name: str) -> None:
    def of(box: Box) -> torch.Tensor:
        found: torch.Tensor = part[box] if box else opened.get_tensor(name)
        return found.to(tensor.dtype)

    if is_device_tensor(tensor):
        fill(tensor, of)
    else:
        with torch.no_grad():
            tensor.copy_(opened.get_tensor(name))


def _files(folder: Path) -> dict[str, Path]:
    """Return for each name the file that it is in."""
    index = folder / _INDEX
    if index.exists():
        names: dict[str, str] = json.loads(index.read_text())["weight_map"]
        return {name: folder / file for name, file in names.items()}
    single = folder / _SINGLE
    if not single.exists():
        raise FileNotFoundError(f"{folder} has neither {_SINGLE} nor {_INDEX}")
    with importlib.import_module("safetensors").safe_open(single, framework="pt") as opened:
        return dict.fromkeys(opened.keys(), single)
