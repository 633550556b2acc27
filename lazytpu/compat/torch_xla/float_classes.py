"""Classes as floating-point numbers: torch_xla's ``nll_loss`` and ``cross_entropy`` take them, torch's raise."""

from __future__ import annotations

import torch

_loss = torch.ops.aten.nll_loss_nd.default
_library = torch.library.Library("aten", "IMPL")


def register() -> None:
    """Have the losses of class numbers take floating-point ones, whose fractions do not count."""
    for key in ("PrivateUse1", "AutogradPrivateUse1"):
        _library.impl("nll_loss_nd", _nll_loss, key)


def _nll_loss(x: torch.Tensor, target: torch.Tensor, *options: object, **more: object) -> torch.Tensor:
    classes = target.long() if target.is_floating_point() else target
    found: torch.Tensor = _loss.decompose(x, classes, *options, **more)
    return found
