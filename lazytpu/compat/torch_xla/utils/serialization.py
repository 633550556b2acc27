"""``torch_xla.utils.serialization``: files of ``torch.save``, with what they hold on the CPU."""

from __future__ import annotations

import os
from typing import Any

import torch

from lazytpu.compat import lacking
from lazytpu.compat.torch_xla.core import xla_model

__getattr__ = lacking.names_of(__name__)


def save(data: Any, path: str | os.PathLike[str], master_only: bool = True, global_master: bool = False) -> None:
    """Writes one file (torch_xla writes a folder of tensors beside it), which `load` and ``torch.load`` read."""
    xla_model.save(data, path)


def load(path: str | os.PathLike[str]) -> Any:
    """Reads what `save` wrote, to the CPU.  Only tensors and plain containers, as ``torch.load`` does by default."""
    return torch.load(path, map_location="cpu")
