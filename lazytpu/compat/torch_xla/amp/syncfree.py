"""``torch_xla.amp.syncfree``: optimizers that skip a step with infinite gradients without reading them on the host.

torch's fused optimizers do that: a ``GradScaler`` passes them the flag as a tensor.
"""

from __future__ import annotations

from typing import Any

import torch

from lazytpu.compat import names

__getattr__ = names.missing_from(__name__)


class _Fused(torch.optim.Optimizer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:  # those of the optimizer
        super().__init__(*args, **{"fused": True, **kwargs})


class SGD(_Fused, torch.optim.SGD):
    """``torch.optim.SGD``, fused."""


class Adam(_Fused, torch.optim.Adam):
    """``torch.optim.Adam``, fused."""


class AdamW(_Fused, torch.optim.AdamW):
    """``torch.optim.AdamW``, fused."""
