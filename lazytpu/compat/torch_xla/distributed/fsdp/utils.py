"""``torch_xla.distributed.fsdp.utils``."""

from __future__ import annotations

import functools

from torch import nn
from torch.utils.checkpoint import checkpoint

from lazytpu.compat import names

__getattr__ = names.missing_from(__name__)


def checkpoint_module(module: nn.Module) -> nn.Module:
    """Have a module compute its activations anew in the backward pass; return it."""
    vars(module)["forward"] = functools.partial(checkpoint, module.forward, use_reentrant=False)
    return module
