"""Run one recorded op on the CPU, with the operands it had on the device, in its dtypes or in float64."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Protocol

import torch
from torch.utils._pytree import tree_map

from lazytpu.ir.subgraph import has_body
from lazytpu.ir.tree import Node, Number, Value
from lazytpu.passes.clone import cloned
from lazytpu.runtime.composed import is_random
from lazytpu.runtime.cpu_kernels import call_kernel, laid_out, plain_torch, scalar_operand

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
    if has_body(node):
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

    def operand(x: Value | Number) -> object:
        if type(x) is Value:
            dtype = _WIDER.get(x.layout.dtype, x.layout.dtype) if double else x.layout.dtype
            return laid_out(contents[x].to(dtype), x.layout)
        assert type(x) is Number
        found = scalar_operand(x, scalars.scalar(x) if x.dtype != "rng" else 0)
        return wide(found) if double and isinstance(found, torch.Tensor) else found

    with plain_torch():
        found = call_kernel(_widened(node) if double else node, operand)
    results: list[torch.Tensor | None] = []
    for value, result in zip(node.values, found, strict=True):
        if value is None or result is None:
            results.append(None)
            continue
        result = result.resolve_conj().resolve_neg()
        results.append(result if double and result.dtype in _WIDER.values() else result.to(value.layout.dtype))
    return results


_WIDER = {torch.float16: torch.float64, torch.bfloat16: torch.float64, torch.float32: torch.float64}
_WIDER |= {torch.complex32: torch.complex128, torch.complex64: torch.complex128}


def _widened(node: Node) -> Node:
    """Return the node with double precision where it names a dtype."""
    args, kwargs = tree_map(
        lambda x: _WIDER.get(x, x) if isinstance(x, torch.dtype) else x, (list(node.args), dict(node.kwargs))
    )
    return cloned(node, tuple(args), kwargs, results=True)


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor in double precision, with its strides."""
    return tensor.to(_WIDER.get(tensor.dtype, tensor.dtype))
