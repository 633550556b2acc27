"""From a float module to a quantized one: the same module with its Linear, Conv, Embedding and LSTM replaced."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lazytpu.quantization.modules import (
    QuantizedConv,
    QuantizedEmbedding,
    QuantizedLinear,
    QuantizedLSTM,
    WeightOnlyLinear,
)
from lazytpu.quantization.numbers import DTYPES, largest, scale_for
from lazytpu.quantization.training import RoundedConv, RoundedLinear

Replace = Callable[[str, nn.Module], nn.Module | None]
_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def quantize_weights(module: nn.Module, bits: int = 8, group: int = 32) -> nn.Module:
    """Weights as integers, products of floats.

    Args:
        module: with Linear and Embedding inside.
        bits: 8, or 4 with a scale for each ``group`` of inputs.
        group: see ``bits``; a Linear whose ``in_features`` it does not divide gets int8.

    Raises:
        ValueError: ``bits`` is neither 4 nor 8, or ``group`` is odd.
    """
    if bits not in (4, 8):
        raise ValueError(f"bits is 4 or 8, not {bits}")
    if group % 2:
        raise ValueError(f"group is even, not {group}")

    def replace(name: str, m: nn.Module) -> nn.Module | None:
        if type(m) is nn.Linear:
            return WeightOnlyLinear(m, 8 if m.in_features % group else bits, group)
        return QuantizedEmbedding(m) if type(m) is nn.Embedding and m.max_norm is None else None

    return _replaced(module, replace)


def quantize_dynamic(module: nn.Module, bits: int = 8, per_channel: bool = True) -> nn.Module:
    """Weights and activations as integers; the scale of an activation is found anew in each call.

    Args:
        module: with Linear, Conv1d to Conv3d, Embedding and LSTM inside.
        bits: 8, or 16.
        per_channel: a scale for each row of a weight instead of one for all of it.

    Raises:
        ValueError: ``bits`` is neither 8 nor 16.
    """
    return _replaced(module, lambda name, m: _integers(m, None, bits, per_channel))


def quantize_static(
    module: nn.Module, ranges: dict[str, torch.Tensor], bits: int = 8, per_channel: bool = True
) -> nn.Module:
    """Weights and activations as integers, with the scales of activations fixed.

    Args:
        module: as for `quantize_dynamic`.
        ranges: what `calibrate` returned for it.
        bits: 8, or 16.
        per_channel: as for `quantize_dynamic`.

    Raises:
        ValueError: ``bits`` is neither 8 nor 16.
        KeyError: a module was not called while the ranges were measured.
    """

    def replace(name: str, m: nn.Module) -> nn.Module | None:
        if type(m) in (nn.Linear, *_CONVS):
            return _integers(m, scale_for(ranges[name], bits), bits, per_channel)
        return _integers(m, None, bits, per_channel)

    return _replaced(module, replace)


def calibrate(module: nn.Module, batches: Iterable[Any]) -> dict[str, torch.Tensor]:
    """The largest magnitude of the input of each Linear and Conv in a run over sample data.

    Args:
        module: called with each batch, in its present mode and without gradients.
        batches: tensors, or tuples of arguments.

    Returns:
        Name of a module to its range, float32 [] on the module's device.
    """
    ranges: dict[str, torch.Tensor] = {}
    with _watched(module, ranges), torch.no_grad():
        for batch in batches:
            module(*batch) if isinstance(batch, (tuple, list)) else module(batch)
    return ranges


@contextmanager
def _watched(module: nn.Module, ranges: dict[str, torch.Tensor]) -> Iterator[None]:
    def watch(name: str) -> Callable[..., None]:
        def note(m: nn.Module, args: Any) -> None:
            seen = largest(args[0]).float()
            ranges[name] = torch.maximum(ranges[name], seen) if name in ranges else seen

        return note

    hooks = [
        m.register_forward_pre_hook(watch(n)) for n, m in module.named_modules() if type(m) in (nn.Linear, *_CONVS)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def prepare_training(
    module: nn.Module, bits: int = 8, per_channel: bool = True, momentum: float = 0.9, in_place: bool = False
) -> nn.Module:
    """A module that rounds weights and inputs of Linear and Conv while it trains; then `convert` it.

    Args:
        module: what to train.
        bits: from 2 to 31; `convert` takes 8 and 16.
        per_channel: a range for each row of a weight.
        momentum: how much of the old range of an input stays at each batch, from 0 to 1.
        in_place: change ``module`` instead of a copy, so that an optimizer made for it goes on.

    Raises:
        ValueError: ``bits`` is out of range.
    """
    if not 2 <= bits <= 31:
        raise ValueError(f"bits is from 2 to 31, not {bits}")

    def replace(name: str, m: nn.Module) -> nn.Module | None:
        if type(m) is nn.Linear:
            return RoundedLinear(m, bits, per_channel, momentum)
        return RoundedConv(m, bits, per_channel, momentum) if isinstance(m, _CONVS) and type(m) in _CONVS else None

    return _replaced(module, replace, in_place)


def convert(module: nn.Module) -> nn.Module:
    """The quantized module of one that was trained after `prepare_training`.

    Raises:
        ValueError: it was trained with neither 8 nor 16 bits.
    """

    def replace(name: str, m: nn.Module) -> nn.Module | None:
        if isinstance(m, (RoundedLinear, RoundedConv)):
            scale = scale_for(m.amax, m.bits)
            return _integers(m.as_conv() if isinstance(m, RoundedConv) else m, scale, m.bits, m.per_row)
        return None

    return _replaced(module, replace)


def _integers(m: nn.Module, input_scale: torch.Tensor | None, bits: int, per_row: bool) -> nn.Module | None:
    """The quantized form of one module, or None for a kind that has none."""
    if bits not in DTYPES:
        raise ValueError(f"bits is 8 or 16, not {bits}")
    if type(m) in (nn.Linear, RoundedLinear):
        return QuantizedLinear(m, input_scale, bits, per_row)  # type: ignore[arg-type]
    if isinstance(m, _CONVS) and m.padding_mode == "zeros":
        return QuantizedConv(m, input_scale, bits, per_row)
    if type(m) is nn.Embedding and m.max_norm is None:
        return QuantizedEmbedding(m)
    return QuantizedLSTM(m, bits) if type(m) is nn.LSTM and not m.proj_size else None


def _replaced(module: nn.Module, replace: Replace, in_place: bool = False) -> nn.Module:
    """A copy of a module with parts replaced; parts that are one module in it are one in the copy."""
    module = module if in_place else copy.deepcopy(module)
    made: dict[nn.Module, nn.Module | None] = {}

    def visit(name: str, m: nn.Module) -> nn.Module:
        if m not in made:
            made[m] = replace(name, m)
            if made[m] is None:
                for part, child in m._modules.items():  # `named_children` passes over a module that is there twice
                    if child is not None:
                        setattr(m, part, visit(f"{name}.{part}" if name else part, child))
        new = made[m]
        if new is None:
            return m
        new.train(m.training)
        return new

    return visit("", module)
