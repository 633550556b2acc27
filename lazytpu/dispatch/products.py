"""Products that are one node with one gradient node, where torch would compose them: ``linear`` and ``matmul``.

Torch composes ``F.linear`` of a transposition and ``addmm``, nine nodes with their gradients, and a product of batches
of two expansions, three reshapes and ``bmm``, some twenty nodes.  For nested tensors it also has a single derivative of
each, which is used here on the way through autograd, except

* where one derivative for all arguments would save a tensor that eager does not save, as the user would notice who
  writes to it;
* where eager's results or gradients would lie otherwise in memory;
* under a ``TorchDispatchMode``, which may look for ``addmm`` or ``bmm``: torch's counter of FLOPs does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor

from lazytpu.dispatch.general import COMPOSED
from lazytpu.ir.op_schema import aten
from lazytpu.runtime import composed
from lazytpu.tensors.layout import Layout
from lazytpu.tensors.tensor import LazyTensor

_modes = torch._C._len_torch_dispatch_stack
_BELOW_AUTOGRAD = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)
_WITH_GRADIENT = _BELOW_AUTOGRAD.add(torch._C.DispatchKey.AutogradNestedTensor)  # leads to torch's own derivative
_linear_handle = aten.linear.default._handle.redispatch_boxed
_matmul_handle = aten.matmul.default._handle.redispatch_boxed
_Product: TypeAlias = Callable[[Tensor, Tensor], Tensor]
_gradient_handle = aten.matmul_backward.default._handle.redispatch_boxed


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``F.linear``, on the way through autograd."""
    if type(x) is LazyTensor and type(weight) is LazyTensor and forward_ad._current_level < 0 and not _modes():
        if x.requires_grad:
            way = _WITH_GRADIENT if weight.requires_grad else None
        else:
            way = None if weight.requires_grad or (bias is not None and bias.requires_grad) else _BELOW_AUTOGRAD
        if way is None and not torch.is_grad_enabled():
            way = _BELOW_AUTOGRAD
        if way is not None and _is_plain(x._s.layout, weight._s.layout, bias):
            fused: Tensor = _linear_handle(way, x, weight, bias)
            return fused
    decomposed: Tensor = _linear_handle(COMPOSED, x, weight, bias)
    return decomposed


def _is_plain(x: Layout, weight: Layout, bias: Tensor | None) -> bool:
    """Return whether eager's results and gradients are contiguous and real, and nothing broadcasts."""
    if not (x.contiguous and weight.contiguous and len(weight.size) == 2 and len(x.size) > 1):
        return False
    if 0 in x.size or 0 in weight.size or x.dtype.is_complex:
        return False
    return bias is None or (type(bias) is LazyTensor and bias._s.layout.size == weight.size[:1])


def matmul(recorded: _Product, mm: _Product) -> tuple[_Product, _Product]:
    """Return the kernels of ``torch.matmul``: on the way through autograd, and below.

    Where eager copies an operand, because its batches do not lie one behind the other, the copy is recorded: it is what
    autograd saves.

    Args:
        recorded: records one node.
        mm: records the product of two matrices.
    """

    def kernel(x: Tensor, other: Tensor) -> Tensor:
        if type(x) is LazyTensor and type(other) is LazyTensor and forward_ad._current_level < 0 and not _modes():
            a, b = x._s.layout, other._s.layout
            plain = len(a.size) == 2 == len(b.size)
            if plain or _is_batched(a, b):
                if not (x.requires_grad or other.requires_grad) or not torch.is_grad_enabled():
                    return mm(x, other) if plain else recorded(x, other)
                if x.requires_grad and other.requires_grad and not plain:
                    x = x if _is_one_row(a) else x.contiguous()
                    other = other if _is_one_row(b) else other.contiguous()
                    with_gradient: Tensor = _matmul_handle(_WITH_GRADIENT, x, other)
                    return with_gradient
        return decomposed(x, other)

    def below(x: Tensor, other: Tensor) -> Tensor:
        if type(x) is LazyTensor and type(other) is LazyTensor and _is_batched(x._s.layout, other._s.layout):
            return recorded(x, other)
        return decomposed(x, other)

    decomposed: _Product = partial(_matmul_handle, COMPOSED)
    return kernel, below


def matmul_backward(grad: Tensor, x: Tensor, other: Tensor, mask: Sequence[bool]) -> Sequence[Tensor | None]:
    """Compute the gradients of `matmul`: as products of their own where these are to have gradients."""
    if not torch.is_grad_enabled() or not (grad.requires_grad or x.requires_grad or other.requires_grad):
        found: Sequence[Tensor | None] = _gradient_handle(_BELOW_AUTOGRAD, grad, x, other, mask)
        return found
    return composed.matmul_backward(grad, x, other, mask)


def _is_batched(x: Layout, other: Layout) -> bool:
    """Return whether these are batches of matrices, or rows of vectors and a matrix, of which nothing broadcasts."""
    a, b = x.size, other.size
    if len(a) < 3 or len(b) < 2 or a[-1] != b[-2] or 0 in a or 0 in b:
        return False
    if x.dtype is not other.dtype or not x.dtype.is_floating_point:
        return False
    return a[:-2] == b[:-2] or (len(b) == 2 and x.contiguous and other.contiguous)


def _is_one_row(layout: Layout) -> bool:
    """Return whether the matrices of a batch lie at equal distances, so that they need no copy for ``bmm``."""
    steps = [(n, step) for n, step in zip(layout.size[:-2], layout.stride[:-2], strict=True) if n != 1]
    return all(far == near * n for (_, far), (n, near) in zip(steps, steps[1:], strict=False))
