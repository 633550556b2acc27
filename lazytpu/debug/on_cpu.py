"""Run one recorded op on the CPU, with the operands it had on the device."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_flatten, tree_map

from lazytpu.debug.composed import COMPOSED, is_random
from lazytpu.ir.subgraph import Subgraph
from lazytpu.ir.tree import Node, Number, Value
from lazytpu.ir.types import TensorType, overlaps

# Ops with several right results: signs and bases of factors.
_SEVERAL_ANSWERS = re.compile(r"svd|eig|(?<!s)qr|householder|lobpcg")


def why_not(node: Node) -> str:
    """Return why an op cannot be compared; empty where it can."""
    name = str(node.op.name)
    if is_random(node):
        return "uses random numbers"
    if "empty" in name:
        return "returns uninitialized memory"
    if _SEVERAL_ANSWERS.search(name):
        return "has several correct results"
    if any(isinstance(x, Subgraph) for x in (*node.args, *node.kwargs.values())):
        return "has a body"
    return ""


class ScalarInputs(Protocol):
    """Knows the scalar inputs of a graph."""

    def scalar(self, x: Number) -> float | complex: ...


def run_on_cpu(
    node: Node, contents: Mapping[Value, torch.Tensor], scalars: ScalarInputs, *, double: bool = False
) -> list[torch.Tensor | None]:
    """Compute the results of an op, one for each of ``node.values``, with torch's CPU kernels.

    Args:
        contents: contents of its tensor operands.
        scalars: the graph the op is from, for its scalar inputs.
        double: compute in float64, to see which of two results is more accurate; operands may be in float64 already.
    """

    def on_cpu(x: object) -> object:
        if type(x) is Value:
            dtype = _WIDER.get(x.layout.dtype, x.layout.dtype) if double else x.layout.dtype
            return laid_out(contents[x].to(dtype), x.layout)
        if type(x) is Number:
            if x.dtype == "rng":
                return None
            number = scalars.scalar(x)
            if isinstance(x.dtype, torch.dtype):
                return torch.tensor(number, dtype=_WIDER.get(x.dtype, x.dtype) if double else x.dtype)
            return x.dtype(number)
        return _WIDER.get(x, x) if double and isinstance(x, torch.dtype) else x

    args, kwargs = tree_map(on_cpu, (list(node.args), dict(node.kwargs)), is_leaf=lambda x: type(x) in (Value, Number))
    with torch.no_grad(), torch.device("cpu"), torch.autocast("cpu", enabled=False):
        kernel: Callable[..., Any] = COMPOSED.get(node.op.recorded, node.op.recorded)
        flat = tree_flatten(kernel(*args, **kwargs), is_leaf=lambda x: x is None)[0]
    results: list[torch.Tensor | None] = []
    for value, result in zip(node.values, flat, strict=True):
        if value is None or result is None:
            results.append(None)
            continue
        result = result.resolve_conj().resolve_neg()
        results.append(result if double and result.dtype in _WIDER.values() else result.to(value.layout.dtype))
    return results


_WIDER = {torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64}
_WIDER |= {torch.complex32: torch.complex128, torch.complex64: torch.complex128}


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in double precision, with its strides."""
    return tensor.to(_WIDER.get(tensor.dtype, tensor.dtype))


def laid_out(contents: torch.Tensor, layout: TensorType) -> torch.Tensor:
    """Return a copy with the strides of a layout, because some ops look at strides."""
    repeated = [dim for dim, (n, s) in enumerate(zip(layout.size, layout.stride, strict=True)) if s == 0 and n > 1]
    if overlaps(layout.size, layout.stride) and not repeated:
        return contents.clone()
    part = contents
    for dim in repeated:
        part = part.narrow(dim, 0, 1)
    stride = [1 if dim in repeated else s for dim, s in enumerate(layout.stride)]
    return torch.empty_strided(part.shape, stride, dtype=part.dtype).copy_(part).expand(layout.size)
