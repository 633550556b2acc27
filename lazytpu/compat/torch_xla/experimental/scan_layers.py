"""``torch_xla.experimental.scan_layers``: see `lazytpu.scan_layers`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

import lazytpu
from lazytpu.compat import lacking

__getattr__ = lacking.names_of(__name__)


def scan_layers(
    layers: Iterable[torch.nn.Module],
    input_data: torch.Tensor,
    partition_fn: Callable[..., Any] | None = None,
    is_layer_pure: bool = False,
) -> torch.Tensor:
    """Applies layers of equal structure one after the other, compiled as one loop.

    Args:
        layers: modules of one class with parameters of the same types.
        input_data: what the first takes; each gives a tensor of the same type.
        partition_fn: ``min_cut_rematerialization_partition`` keeps only what goes from layer to layer for the
            backward pass, and computes the rest again; others are not looked at.
        is_layer_pure: not looked at.
    """
    again = getattr(partition_fn, "__name__", "").startswith("min_cut_rematerialization")
    return lazytpu.scan_layers(list(layers), input_data, checkpoint=again)


__all__ = ["scan_layers"]
