"""``torch_xla.utils.serialization``: files of ``torch.save``, with their tensors on the CPU."""

from __future__ import annotations

import os

import torch

from lazytpu.compat import names
from lazytpu.compat.torch_xla.core import xla_model

__getattr__ = names.missing_from(__name__)


def save(data: object, path: str | os.PathLike[str], master_only: bool = True, global_master: bool = False) -> None:
    """Write one file, which `load` and ``torch.load`` read (torch_xla writes a folder of tensors beside it)."""
    xla_model.save(data, path)


def load(path: str | os.PathLike[str]) -> object:
    """Read what `save` wrote, to the CPU.  Only tensors and plain containers, as ``torch.load`` does by default."""
    found: object = torch.load(path, map_location="cpu")
    return found
