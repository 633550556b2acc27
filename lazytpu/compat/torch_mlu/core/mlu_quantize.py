"""``torch_mlu.core.mlu_quantize``: quantized inference and training, by `lazytpu.quantization`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import torch
from torch import nn

from lazytpu import quantization
from lazytpu.compat import names

__getattr__ = names.missing_from(__name__)

_BITS = {"int8": 8, "int16": 16}


class QConfig(TypedDict, total=False):
    """How the first convolution takes an image; see `quantize_dynamic_mlu`."""

    firstconv: bool
    mean: Sequence[float]
    std: Sequence[float]


def quantize_dynamic_mlu(
    model: nn.Module,
    qconfig_spec: QConfig | None = None,
    dtype: str = "int8",
    mapping: None = None,
    inplace: bool = False,
    gen_quant: bool = False,
) -> nn.Module:
    """Return a copy of the model with integer weights and products in Linear, Conv, Embedding and LSTM.

    Args:
        model: in float.
        qconfig_spec: ``firstconv``: normalize an image of bytes (uint8) to ``(x / 255 - mean) / std``, with a
            ``mean`` and a ``std`` for each channel; an image of floats is used as it is.
        dtype: ``int8`` or ``int16``.
        mapping: not supported: which modules are quantized is fixed.
        inplace: not supported.
        gen_quant: ignored: weights are always quantized, and ``load_state_dict`` may replace them.

    Raises:
        ValueError: ``dtype`` is another, or ``mapping`` or ``inplace`` is set.
    """
    if dtype not in _BITS:
        raise ValueError(f"dtype is 'int8' or 'int16', not {dtype!r}")
    if mapping is not None or inplace:
        raise ValueError("mapping and inplace are not supported: a quantized copy is returned")
    spec = qconfig_spec or QConfig()
    quantized = quantization.quantize_dynamic(model, _BITS[dtype])
    if spec.get("firstconv"):
        quantized.register_forward_pre_hook(_Normalize(spec.get("mean", [0]), spec.get("std", [1])))
    return quantized


class _Normalize:
    """Normalizes images of bytes before the module sees them."""

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean, self.std = list(mean), list(std)

    def __call__(self, module: nn.Module, args: tuple[object, ...]) -> tuple[object, ...]:
        x, *rest = args
        if not isinstance(x, torch.Tensor) or x.dtype != torch.uint8:
            return args
        mean, std = (x.new_tensor(v, dtype=torch.float32).reshape(-1, 1, 1) for v in (self.mean, self.std))
        return ((x.to(torch.float32) / 255 - mean) / std, *rest)


def adaptive_quantize(
    model: nn.Module, steps_per_epoch: int, bitwidth: int = 8, inplace: bool = True, **options: object
) -> nn.Module:
    """Make a model round its weights and inputs while it trains, in place as the original does.

    Args:
        model: in float.
        steps_per_epoch: steps of an epoch; the range of an input is a moving average over a tenth of them.
        bitwidth: 8, 16 or 31; the rounding of 31 bits is finer than that of float32.
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
    momentum = max(0.0, 1 - 10 / steps_per_epoch)
    return quantization.prepare_training(model, bitwidth, momentum=min(momentum, 0.99), in_place=inplace)


def dequantize(model: nn.Module) -> nn.Module:
    """Return the integer model of one that was trained after `adaptive_quantize` with 8 or 16 bits."""
    return quantization.convert(model)
