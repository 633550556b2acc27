"""``torch_xla.utils.dlpack``: torch's own DLPack."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]

import lazytpu
from lazytpu.compat import lacking

__getattr__ = lacking.names_of(__name__)


def from_dlpack(ext_tensor: Any) -> torch.Tensor:
    """A device tensor with the contents of another library's tensor, or of a capsule."""
    return torch.from_dlpack(ext_tensor).to(lazytpu.device())  # type: ignore[attr-defined]


__all__ = ["from_dlpack", "to_dlpack"]
