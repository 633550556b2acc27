"""Quantization: weights and activations of Linear, Conv, Embedding and LSTM as small integers.

======================  ====================  ===================================================================
function                activations           use
======================  ====================  ===================================================================
`quantize_weights`      floats                int8 or int4 weights, a quarter or an eighth of the bytes
`quantize_dynamic`      int8, scale per call  integer products, nothing to prepare
`quantize_static`       int8, fixed scale     integer products with scales from a run over sample data
`prepare_training`      rounded as they will  training that gets used to the rounding; then `convert`
======================  ====================  ===================================================================

All of them return a new module and leave the given one as it is.  In inference the products are of integers in
the HLO (``s8`` operands, ``s32`` sums).
"""

from lazytpu.quantization.convert import (
    calibrate,
    convert,
    prepare_training,
    quantize_dynamic,
    quantize_static,
    quantize_weights,
)
from lazytpu.quantization.modules import QuantizedConv, QuantizedEmbedding, QuantizedLinear
from lazytpu.quantization.recurrence import QuantizedLSTM
from lazytpu.quantization.training import RoundedConv, RoundedEmbedding, RoundedLinear
from lazytpu.quantization.weight_only import WeightOnlyConv, WeightOnlyEmbedding, WeightOnlyLinear

__all__ = [
    "QuantizedConv",
    "QuantizedEmbedding",
    "QuantizedLSTM",
    "QuantizedLinear",
    "RoundedConv",
    "RoundedEmbedding",
    "RoundedLinear",
    "WeightOnlyConv",
    "WeightOnlyEmbedding",
    "WeightOnlyLinear",
    "calibrate",
    "convert",
    "prepare_training",
    "quantize_dynamic",
    "quantize_static",
    "quantize_weights",
]
