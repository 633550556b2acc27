"""Kernels of torch that trust values of their operands, and end the process where these are wrong: they are looked at.

What raises here runs by the op's lowering rule, for which any value will do: an interpreted graph gives what the
compiled one does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

aten = torch.ops.aten
_Results: TypeAlias = Tensor | Sequence[Tensor | None]
Kernel: TypeAlias = Callable[..., _Results]


def _indices_within(kernel: Kernel, at: int, size_of: Callable[..., int]) -> Kernel:
    """Return a kernel that refuses indices out of range.

    Args:
        at: the position of the indices among the arguments.
        size_of: the size they are to be below, of all arguments.
    """

    def guarded(*args: object, **kwargs: object) -> _Results:
        indices = args[at]
        if isinstance(indices, Tensor) and indices.numel():
            least, most = indices.aminmax()
            if least < 0 or most >= size_of(*args):
                raise IndexError("an index is out of range")
        return kernel(*args, **kwargs)

    return guarded


def _divided(kernel: Kernel) -> Kernel:
    """Return a kernel of quotients that refuses divisors of -1: the least integer has no quotient by it."""

    def guarded(x: Tensor, y: Tensor | complex, **kwargs: object) -> _Results:
        integers = isinstance(x, Tensor) and not x.is_floating_point() and not x.is_complex()
        if integers and (bool((y == -1).any()) if isinstance(y, Tensor) else y == -1):
            raise OverflowError("the quotient may be too large")
        return kernel(x, y, **kwargs)

    return guarded


def _finite(kernel: Kernel, at: int) -> Kernel:
    """Return a kernel that refuses what is not finite in the argument at position ``at``."""

    def guarded(*args: object, **kwargs: object) -> _Results:
        looked_at = args[at]
        if isinstance(looked_at, Tensor) and not bool(looked_at.isfinite().all()):
            raise ValueError("a value is not finite")
        return kernel(*args, **kwargs)

    return guarded


def _sizes_of_planes(grad: Tensor, x: Tensor, *_: object) -> int:
    return x.shape[-1] * x.shape[-2]


GUARDED: dict[torch._ops.OpOverload, Kernel] = {
    op: _indices_within(op, at, size_of)
    for op, at, size_of in (
        (aten._embedding_bag.default, 1, lambda weight, *_: weight.shape[0]),
        (aten._embedding_bag_forward_only.default, 1, lambda weight, *_: weight.shape[0]),
        (aten._embedding_bag_backward.default, 1, lambda *given: given[6]),
        (aten._embedding_bag_dense_backward.default, 1, lambda *given: given[5]),
        (aten._embedding_bag_per_sample_weights_backward.default, 2, lambda grad, weight, *_: weight.shape[0]),
        (aten._ctc_loss.default, 1, lambda log_probs, *_: log_probs.shape[-1]),
        (aten._ctc_loss.Tensor, 1, lambda log_probs, *_: log_probs.shape[-1]),
        (aten._ctc_loss_backward.default, 2, lambda grad, log_probs, *_: log_probs.shape[-1]),
        (aten._ctc_loss_backward.Tensor, 2, lambda grad, log_probs, *_: log_probs.shape[-1]),
        (aten.max_pool2d_with_indices_backward.default, 7, _sizes_of_planes),
    )
}
GUARDED |= {
    op: _finite(op, at)
    for op, at in (
        (aten._linalg_eigvals.default, 0),
        (aten.grid_sampler_2d_backward.default, 2),
        (aten.grid_sampler_3d_backward.default, 2),
    )
}
GUARDED |= {op: _divided(op) for op in (aten.div.Tensor_mode, aten.div.Scalar_mode)}
"""Op to its kernel, where what it trusts has been looked at."""
