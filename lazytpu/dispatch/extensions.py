"""Kernels for the ops of other libraries, torchvision and ``torch.ao``, that have lowering rules.

They are registered by name: the libraries are imported after this one, or never.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from lazytpu.dispatch.general import call_meta, functional, on_other_device, record_new
from lazytpu.ir.op_schema import op_of, overload_named
from lazytpu.tracing.reading import read

_LOWERED = {
    "torchvision": (
        *("roi_align", "_roi_align_backward", "roi_pool", "_roi_pool_backward"),
        *("ps_roi_align", "_ps_roi_align_backward", "ps_roi_pool", "_ps_roi_pool_backward"),
        *("deform_conv2d", "_deform_conv2d_backward"),
    ),
    "quantized_decomposed": (
        *("quantize_per_tensor", "quantize_per_tensor.tensor", "quantize_per_tensor.tensor2"),
        *("dequantize_per_tensor", "dequantize_per_tensor.tensor", "dequantize_per_tensor.tensor2"),
        *("choose_qparams.tensor", "choose_qparams_symmetric.tensor", "quantize_per_channel_group"),
    ),
}
_libraries: list[torch.library.Library] = []


def _functional(namespace: str, name: str) -> Callable[..., object]:
    """Return a kernel that is made at its first call, when the library is there."""
    made: list[Callable[..., Any]] = []

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if not made:
            overload = overload_named(name, namespace)
            assert overload is not None  # torch has called it
            made.append(functional(overload))
        return made[0](*args, **kwargs)

    return kernel


def nms(dets: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    """Non-maximum suppression; cuts the graph for the number of boxes that stay, and for nothing else."""
    if on_other_device((dets, scores), {}):
        found: torch.Tensor = call_meta(torch.ops.torchvision.nms.default, (dets, scores, iou_threshold), {})
        return found
    kept, count = record_new(op_of(torch.ops.lazytpu.nms.default), [dets, scores, iou_threshold])
    stay = int(read(count, "nms"))
    return cast(torch.Tensor, kept[:stay].clone())


def register() -> None:
    """Register the kernels, for ops that may be defined later."""
    for namespace, names in _LOWERED.items():
        library = torch.library.Library(namespace, "IMPL")
        _libraries.append(library)
        for name in names:
            library.impl(name, _functional(namespace, name), "PrivateUse1")
    _libraries[0].impl("nms", nms, "PrivateUse1")
