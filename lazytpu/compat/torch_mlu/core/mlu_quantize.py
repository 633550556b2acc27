"""``torch_mlu.core.mlu_quantize``: quantized inference and training, by `lazytpu.quantization`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from lazytpu import quantization
from lazytpu.compat import lacking

__getattr__ = lacking.names_of(__name__)

_BITS = {"int8": 8, "int16": 16}


def quantize_dynamic_mlu(
    model: nn.Module,
    qconfig_spec: Mapping[str, Any] | None = None,
    dtype: str = "int8",
    mapping: Any = None,
    inplace: bool = False,
    gen_quant: bool = False,
) -> nn.Module:
    """A copy of the model with integer weights and products in Linear, Conv, Embedding and LSTM.

    Args:
        model: in float.
        qconfig_spec: ``firstconv``: an image of bytes (uint8) that comes in is normalized first, to
            ``(x / 255 - mean) / std`` with ``mean`` and ``std`` for each channel; an image of floats is taken as it is.
        dtype: ``int8`` or ``int16``.
        mapping: not taken: which modules are quantized is fixed.
        inplace: not taken.
        gen_quant: taken for the sake of old scripts: weights are quantized here in any case, and
            ``load_state_dict`` may replace them.

    Raises:
        ValueError: ``dtype`` is another, or ``mapping`` or ``inplace`` is given.
    """
    if dtype not in _BITS:
        raise ValueError(f"dtype is 'int8' or 'int16', not {dtype!r}")
    if mapping is not None or inplace:
        raise ValueError("mapping and inplace are not taken: a quantized copy is returned")
    spec = dict(qconfig_spec or {})
    quantized = quantization.quantize_dynamic(model, _BITS[dtype])
    if spec.get("firstconv"):
        quantized.register_forward_pre_hook(_Normalize(spec.get("mean", [0]), spec.get("std", [1])))
    return quantized


class _Normalize:
    """Normalizes images of bytes before the module sees them."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean, self.std = list(mean), list(std)

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, *rest = args
        if not isinstance(x, torch.Tensor) or x.dtype != torch.uint8:
            return args
        mean, std = (x.new_tensor(v, dtype=torch.float32).reshape(-1, 1, 1) for v in (self.mean, self.std))
        return ((x.to(torch.float32) / 255 - mean) / std, *rest)


def adaptive_quantize(
    model: nn.Module, steps_per_epoch: int, bitwidth: int = 8, inplace: bool = True, **options: Any
) -> nn.Module:
    """Makes a model round its weights and inputs while it trains, in place as the original does.

    Args:
        model: in float.
        steps_per_epoch: steps of an epoch; over as many, the range of an input follows the data.
        bitwidth: 8, 16 or 31; 31 rounds to less than a float32 tells apart.
        inplace: change the model itself.
        options: none.

    Raises:
        ValueError: ``bitwidth`` or ``steps_per_epoch`` is out of range.
    """
    if bitwidth not in (8, 16, 31):
        raise ValueError(f"bitwidth is 8, 16 or 31, not {bitwidth}")
    if steps_per_epoch < 1:
        raise ValueError(f"steps_per_epoch is at least 1, not {steps_per_epoch}")
    if options:
        raise TypeError(f"unexpected keyword argument {sorted(options)[0]!r}")
    momentum = max(0.0, 1 - 10 / steps_per_epoch)  # ten times an epoch the range is a new one
    return quantization.prepare_training(model, bitwidth, momentum=min(momentum, 0.99), in_place=inplace)


def dequantize(model: nn.Module) -> nn.Module:
    """The integer model of one that was trained after `adaptive_quantize` with 8 or 16 bits."""
    return quantization.convert(model)
