"""Run one recorded op with torch's CPU kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from lazytpu.ir.tree import Node, Number, Value
from lazytpu.ir.types import TensorType, overlaps
from lazytpu.passes.clone import replaced
from lazytpu.runtime.composed import COMPOSED

Kernel = Callable[..., Any]


@contextmanager
def plain_torch() -> Iterator[None]:
    """Call torch's kernels inside as if the caller had set nothing: no gradients, default device or autocast."""
    with torch.no_grad(), torch._C.DisableTorchFunction(), torch.autocast("cpu", enabled=False):
        yield


def call_kernel(node: Node, operand: Callable[[Value | Number], object]) -> Sequence[torch.Tensor | None]:
    """Call the CPU kernel of an op, inside `plain_torch`; return a result for each of ``node.values``.

    Args:
        operand: what the kernel takes for a tensor or a scalar input.
    """
    kernel: Kernel = COMPOSED.get(node.op.recorded, node.op.recorded)
    args = [replaced(x, operand) for x in node.args]
    if node.kwargs:
        found = kernel(*args, **{name: replaced(x, operand) for name, x in node.kwargs.items()})
    else:
        found = kernel(*args)
    return results_of(found)


def results_of(found: object) -> Sequence[torch.Tensor | None]:
    """Return the results in what a kernel returns, one by one."""
    if isinstance(found, torch.Tensor):
        return [found]
    if isinstance(found, (list, tuple)) and all(x is None or isinstance(x, torch.Tensor) for x in found):
        return found
    results: list[torch.Tensor | None] = tree_flatten(found, is_leaf=lambda x: x is None)[0]
    return results


def scalar_operand(x: Number, number: complex) -> object:
    """Return what a kernel takes for a scalar input: a Python number, or a 0-dim tensor where torch had one."""
    if x.dtype == "rng":
        return None
    return torch.tensor(number, dtype=x.dtype) if isinstance(x.dtype, torch.dtype) else x.dtype(number)


def laid_out(contents: torch.Tensor, layout: TensorType) -> torch.Tensor:
    """Return a tensor with the strides of a layout, because some ops look at strides: a copy where it has others.

    Elements that share memory in the layout have memory of their own: after a write they may differ.
    """
    if contents.stride() == layout.stride or overlaps(layout.size, layout.stride):
        return contents
    return torch.empty_strided(layout.size, layout.stride, dtype=contents.dtype).copy_(contents)
