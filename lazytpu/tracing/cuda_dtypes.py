"""Dtypes that the kernels of accelerators take and those of the CPU do not.

Libraries give any accelerator what CUDA takes: transformers, for one, asks it for a `histc` of int32.  The CPU's
kernels judge arguments here, so where CUDA has a kernel of a dtype for which the CPU has none, they are asked about a
wider one.  What neither has raises the CPU's error.  ``python -m tests.sweep_cuda_dtypes`` compares this with torch's
own lists.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

_HALVES = {torch.float16, torch.bfloat16}
_INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}

ONLY_CUDA: Mapping[str, set[torch.dtype]] = {
    "_fft_c2c": {torch.float16},
    "_fft_c2r": {torch.float16},
    "_fft_r2c": {torch.float16},
    "_upsample_bicubic2d_aa": _HALVES,
    "_upsample_bilinear2d_aa": _HALVES,
    "abs": {torch.bool},
    "avg_pool3d": _HALVES,
    "histc": _INTEGERS,
    "multi_margin_loss": _HALVES,
    "multilabel_margin_loss": _HALVES,
    "multilabel_margin_loss_forward": _HALVES,
    "nansum": {torch.complex64, torch.complex128},
    "polygamma": {torch.float16},
    "round": {torch.float16},  # to a number of decimals
    "rrelu_with_noise": {torch.float16},
    "trace": {torch.bool},
}
"""Names of ops, which stand for their gradients too, to the dtypes that only CUDA takes."""

SAMPLE_DTYPES = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.bool: torch.uint8,
    torch.complex64: torch.float32,  # there is no wider one that the CPU's `nansum` takes
    torch.complex128: torch.float64,
    **dict.fromkeys(_INTEGERS, torch.float32),
}
"""Which dtype to ask the CPU's kernel about in place of one that only CUDA takes."""
