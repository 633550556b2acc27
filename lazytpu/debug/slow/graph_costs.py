"""Dtypes and memory layouts in the graphs that cost the device time which others would not."""

from __future__ import annotations

from math import prod

import torch

from lazytpu.debug.slow.weights import slowness
from lazytpu.dtypes import short_name
from lazytpu.ir.graph import Graph
from lazytpu.ir.tree import Node, Value, operands

_COPIES = ("aten.clone", "aten._to_copy", "aten.contiguous", "aten.copy")
_WIDE = (torch.float64, torch.complex128)


def is_in_slow_dtype(graph: Graph, node: Node) -> bool:
    """Return whether an op computes in a dtype that the device is slow at."""
    return slowness(_dtype(node)) > 1.0


def saved_by_float32(node: Node) -> float:
    """Return the part of the time of a slow dtype that float32 would save."""
    return 1.0 - 1.0 / slowness(_dtype(node))


def dtype_text(node: Node) -> tuple[str, str]:
    """Return what to say of an op in a slow dtype, and the fix."""
    dtype = _dtype(node)
    text = (
        f"{node.op.name} computes in {short_name(dtype)}, which takes {slowness(dtype):.0f} times as long as f32 here"
    )
    if dtype in _WIDE:
        return text, "convert what comes from numpy or Python with .float(), or set torch's default dtype to float32"
    return text, "use float32 or bfloat16 on this device"


def is_laid_out_anew(graph: Graph, node: Node) -> bool:
    """Return whether an op copies a tensor only to have its elements in another order."""
    if not str(node.op.name).startswith(_COPIES) or not node.values or node.values[0] is None:
        return False
    source = next((x for x in operands(node) if type(x) is Value), None)
    made = node.values[0].layout
    if source is None or source.layout.dtype is not made.dtype or prod(made.size) < 2:
        return False
    return _order(source.layout.size, source.layout.stride) != _order(made.size, made.stride)


def layout_text(node: Node) -> tuple[str, str]:
    """Return what to say of an op that lays a tensor out anew, and the fix."""
    made = node.value.layout
    text = f"{node.op.name} copies {made!r} only to change the order of its elements"
    return text, "leave out .contiguous() and .clone(), ops take any layout; or make the tensor in this order, once"


def _order(size: tuple[int, ...], stride: tuple[int, ...]) -> list[int]:
    """Return the dimensions from the largest stride to the smallest, those of size 1 left out."""
    return sorted([i for i, n in enumerate(size) if n > 1], key=lambda i: -stride[i])


def _dtype(node: Node) -> torch.dtype:
    return next((v.layout.dtype for v in node.values if v is not None), torch.float32)
