"""What of torch's operator database is known not to pass on the device, or to run on the CPU, and why.

`test_ops.py` holds every other operator to what the CPU computes, and an entry of this table to failing: one
that passes has to leave the table.
"""

from __future__ import annotations

import torch

Key = tuple[str, str, torch.dtype]  # operator, variant, dtype

_TIES = "which of equal values comes first is up to the algorithm; here their order is kept"
_COARSE = "the CPU computes coordinates in bfloat16 and is off by up to 0.1; here they are float32"

STATUS: dict[Key, str] = {
    ("matrix_exp", "", torch.bfloat16): "the CPU gives NaN; here the exponential is computed in float32",
    ("matrix_exp", "", torch.float32): "the CPU is 3e-4 off where the norm is large, this device 1e-4",
    ("argsort", "", torch.bfloat16): _TIES,
    ("grid_sampler_2d", "", torch.bfloat16): _COARSE,
    ("grid_sampler_3d", "", torch.bfloat16): _COARSE,
    ("nn.functional.grid_sample", "", torch.bfloat16): _COARSE,
}

# Operators that take some arguments the CPU refuses, by full name.
NOT_REFUSED: dict[str, str] = {
    "aminmax": "the dtype of out= is cast to, not checked",
    "index_add": "torch's meta kernel does not check the shape of the source",
    "masked_scatter": "torch's meta kernel does not check the dtype of the mask",
    "nn.functional.conv1d": "torch's meta kernel does not check the dilation",
    "nn.functional.conv2d": "torch's meta kernel does not check the dilation",
    "nn.functional.softshrink": "lambda is an input of the graph, whose value is not looked at",
}
