"""``torch_xla.amp.syncfree``: optimizers that skip a step of infinite gradients without reading them on the host.

Torch's fused optimizers do that: a ``GradScaler`` hands them the flag as a tensor.
"""

from __future__ import annotations

from typing import Any

import torch

from lazytpu.compat import lacking

__getattr__ = lacking.names_of(__name__)


class SGD(torch.optim.SGD):
    """``torch.optim.SGD``, fused."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"fused": True, **kwargs})


class Adam(torch.optim.Adam):
    """``torch.optim.Adam``, fused."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"fused": True, **kwargs})


class AdamW(torch.optim.AdamW):
    """``torch.optim.AdamW``, fused."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"fused": True, **kwargs})
