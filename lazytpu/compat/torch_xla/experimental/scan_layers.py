"""``torch_xla.experimental.scan_layers``: see `lazytpu.scan_layers`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

import lazytpu
from lazytpu.compat import names

__getattr__ = names.missing_from(__name__)


def scan_layers(
    layers: Iterable[torch.nn.Module],
    input_data: torch.Tensor,
    partition_fn: Callable[..., object] | None = None,
    is_layer_pure: bool = False,
) -> torch.Tensor:
    """Apply layers of equal structure one after the other, compiled as one loop.

    Args:
        layers: modules of one class with parameters of the same types.
        input_data: the input of the first; each returns a tensor of the same type.
        partition_fn: ``min_cut_rematerialization_partition`` keeps only the inputs of the layers for the backward pass,
            and recomputes the rest; others are ignored.
        is_layer_pure: ignored.
    """
    again = getattr(partition_fn, "__name__", "").startswith("min_cut_rematerialization")
    return lazytpu.scan_layers(list(layers), input_data, checkpoint=again)
