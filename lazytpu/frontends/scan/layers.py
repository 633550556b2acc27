"""Whether modules are equal but for the contents of their parameters: what `scan_layers` asks for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import torch
from torch import nn

_SIMPLE = (int, float, complex, str, bool, type(None), torch.dtype, torch.Size)
_PARTS = {"_parameters", "_buffers", "_modules"}


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by name, each once."""
    return dict(chain(module.named_parameters(), module.named_buffers()))


def differences(layers: Sequence[nn.Module]) -> str:
    """Return the first difference between the first of the layers and another, in words; empty where there is none."""
    if len(layers) < 2:
        return ""
    first = dict(_features(layers[0]))
    for i, layer in enumerate(layers[1:], 1):
        other = dict(_features(layer))
        if other == first:
            continue
        for name in [*first, *other]:
            a, b = first.get(name, "missing"), other.get(name, "missing")
            if a != b:
                return f"{name} is {_shown(a)} in layer 0 and {_shown(b)} in layer {i}"
    return ""


def _features(layer: nn.Module) -> Iterator[tuple[str, object]]:
    """Yield what decides the computation of a module, by name."""
    for name, module in layer.named_modules():
        yield f"the class of {name or 'the layer'}", type(module)
        for key, value in vars(module).items():
            if key in _PARTS:
                continue
            if isinstance(value, _SIMPLE):
                yield f"{name}.{key}".lstrip("."), value
            elif isinstance(value, (list, tuple)) and all(isinstance(e, _SIMPLE) for e in value):
                yield f"{name}.{key}".lstrip("."), tuple(value)
            elif isinstance(value, dict) and key.endswith("_hooks"):
                yield f"the number of {name}.{key}", len(value)
            elif callable(value) and not isinstance(value, nn.Module):
                yield f"{name}.{key}".lstrip("."), getattr(value, "__qualname__", type(value))
        for key, tensor in chain(module._parameters.items(), module._buffers.items()):
            described = None if tensor is None else (tuple(tensor.shape), tensor.dtype, tensor.requires_grad)
            yield f"{name}.{key}".lstrip("."), described


def _shown(x: object) -> str:
    return x.__name__ if isinstance(x, type) else x if x == "missing" else repr(x)
