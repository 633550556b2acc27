"""From a float module to a quantized one: the same module with its Linear, Conv, Embedding and LSTM replaced."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeGuard

import torch
from torch import nn

from lazytpu.quantization.modules import QuantizedConv, QuantizedEmbedding, QuantizedLinear
from lazytpu.quantization.numbers import DTYPES, largest, scale_for
from lazytpu.quantization.recurrence import Make, QuantizedLSTM
from lazytpu.quantization.training import RoundedConv, RoundedEmbedding, RoundedLinear
from lazytpu.quantization.weight_only import WeightOnlyConv, WeightOnlyEmbedding, WeightOnlyLinear

Replace = Callable[[str, nn.Module], nn.Module | None]
_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_STATE = 1.0  # the largest state of an LSTM, a product of a sigmoid and a tanh
_WATCHED = (nn.Linear, nn.LSTM, *_CONVS)


def quantize_weights(module: nn.Module, bits: int = 8, group: int = 32) -> nn.Module:
    """Return a copy of a module with weights as integers and products of floats.

    Args:
        module: with Linear, Conv1d to Conv3d, Embedding and LSTM inside.
        bits: 8, or 4 with a scale for each ``group`` of the weights of an output.
        group: see ``bits``; where it does not divide them, the next smaller even number that does, down to 16.  A
            weight for which there is none gets int8.

    Raises:
        ValueError: ``bits`` is neither 4 nor 8, or ``group`` is odd.
    """
    if bits not in (4, 8):
        raise ValueError(f"bits must be 4 or 8, not {bits}")
    if group % 2:
        raise ValueError(f"group must be even, not {group}")

    def replace(name: str, m: nn.Module) -> nn.Module | None:
        if type(m) is nn.Linear:
            return WeightOnlyLinear(m, bits, group)
        if isinstance(m, _CONVS) and type(m) in _CONVS:
            return WeightOnlyConv(m, bits, group)
        if _is_table(m):
            return QuantizedEmbedding(m) if bits == 8 else WeightOnlyEmbedding(m, bits, group)
        if _is_lstm(m):
            return QuantizedLSTM(m, make=lambda linear, layer, part: WeightOnlyLinear(linear, bits, group))
        return None

    return _replaced(module, replace)


def quantize_dynamic(module: nn.Module, bits: int = 8, per_channel: bool = True) -> nn.Module:
    """Return a copy of a module with weights and activations as integers, and scales of activations found in each call.

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
    """Return a copy of a module with weights and activations as integers, and fixed scales of activations.

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
        watched = type(m) in _WATCHED and (type(m) is not nn.LSTM or _is_lstm(m))
        return _integers(m, scale_for(ranges[name], bits) if watched else None, bits, per_channel)

    return _replaced(module, replace)


def calibrate(module: nn.Module, batches: Iterable[object]) -> dict[str, torch.Tensor]:
    """Return the largest magnitude of the input of each Linear, Conv and LSTM in a run over sample data.

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

    hooks = [m.register_forward_pre_hook(watch(n)) for n, m in module.named_modules() if type(m) in _WATCHED]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def prepare_training(
    module: nn.Module, bits: int = 8, per_channel: bool = True, momentum: float = 0.9, in_place: bool = False
) -> nn.Module:
    """Return a module that rounds weights and inputs of Linear, Conv, Embedding and LSTM in training, for `convert`.

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
        raise ValueError(f"bits must be from 2 to 31, not {bits}")

    def rounded_cell(linear: nn.Linear, layer: int, part: str) -> nn.Module:
        if part == "ih" and layer == 0:
            return RoundedLinear(linear, bits, per_channel, momentum)
        made = RoundedLinear(linear, bits, per_channel, momentum=1.0)  # its range stays
        made.amax.fill_(_STATE)
        return made

    def replace(name: str, m: nn.Module) -> nn.Module | None:
        if type(m) is nn.Linear:
            return RoundedLinear(m, bits, per_channel, momentum)
        if isinstance(m, _CONVS) and type(m) in _CONVS:
            return RoundedConv(m, bits, per_channel, momentum)
        if _is_table(m):
            return RoundedEmbedding(m, bits, per_channel)
        if _is_lstm(m):
            return QuantizedLSTM(m, make=rounded_cell)
        return None

    return _replaced(module, replace, in_place)


def convert(module: nn.Module) -> nn.Module:
    """Return the quantized module of one that was trained after `prepare_training`.

    Raises:
        ValueError: it was trained with neither 8 nor 16 bits.
    """

    def replace(name: str, m: nn.Module) -> nn.Module | None:
        if isinstance(m, (RoundedLinear, RoundedConv)):
            scale = scale_for(m.amax, m.bits)
            return _integers(m.as_conv() if isinstance(m, RoundedConv) else m, scale, m.bits, m.per_row)
        return _integers(m, None, m.bits, m.per_row) if isinstance(m, RoundedEmbedding) else None

    return _replaced(module, replace)


def _integers(m: nn.Module, input_scale: torch.Tensor | None, bits: int, per_row: bool) -> nn.Module | None:
    """Return the quantized form of one module, or None for a kind that has none."""
    if bits not in DTYPES:
        raise ValueError(f"bits must be 8 or 16, not {bits}")
    if type(m) in (nn.Linear, RoundedLinear):
        return QuantizedLinear(m, input_scale, bits, per_row)  # type: ignore[arg-type]
    if isinstance(m, _CONVS) and m.padding_mode == "zeros":
        return QuantizedConv(m, input_scale, bits, per_row)
    if _is_table(m) or isinstance(m, RoundedEmbedding):
        return QuantizedEmbedding(m, bits, per_row)
    return QuantizedLSTM(m, make=_cell_of(input_scale, bits, per_row)) if _is_lstm(m) else None


def _is_table(m: nn.Module) -> TypeGuard[nn.Embedding]:
    return type(m) is nn.Embedding and m.max_norm is None


def _is_lstm(m: nn.Module) -> TypeGuard[nn.LSTM]:
    return type(m) is nn.LSTM and not m.proj_size


def _cell_of(input_scale: torch.Tensor | None, bits: int, per_row: bool) -> Make:
    """Return how the products of an LSTM become integers; with a scale for its input, the others know theirs, too."""

    def make(linear: nn.Linear, layer: int, part: str) -> nn.Module:
        if input_scale is None or part == "ih" and layer == 0:
            return QuantizedLinear(linear, input_scale, bits, per_row)
        state = torch.full((), _STATE, device=linear.weight.device)
        return QuantizedLinear(linear, scale_for(state, bits), bits, per_row)

    return make


def _replaced(module: nn.Module, replace: Replace, in_place: bool = False) -> nn.Module:
    """Return a copy of a module with parts replaced; parts that are one module in it are one in the copy."""
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

    replaced = visit("", module)
    made.clear()  # `visit` refers to itself, and would keep what was replaced, with its parameters
    return replaced
