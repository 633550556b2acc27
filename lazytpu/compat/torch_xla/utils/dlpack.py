"""``torch_xla.utils.dlpack``: torch's own DLPack."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils import dlpack

import lazytpu
from lazytpu.compat import names

__getattr__ = names.missing_from(__name__)
to_dlpack: Callable[[torch.Tensor], object] = vars(dlpack)["to_dlpack"]  # which torch's types leave out


def from_dlpack(ext_tensor: object) -> torch.Tensor:
    """Return a device tensor with the contents of another library's tensor, or of a capsule."""
    return dlpack.from_dlpack(ext_tensor).to(lazytpu.device())
