"""``torch_xla.experimental.scan``: torch's own scan, which is one loop on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lazytpu.compat import lacking

__getattr__ = lacking.names_of(__name__)


def scan(
    fn: Callable[[Any, Any], tuple[Any, Any]],
    init: Any,
    xs: Any,
    partition_fn: Callable[..., Any] | None = None,
    is_fn_pure: bool = False,
) -> tuple[Any, Any]:
    """Applies ``fn(carry, x) -> (carry, y)`` along the first dimension of the tensors in ``xs``, with gradients.

    Args:
        fn: the step; what it reads besides its arguments is part of the gradient, too.
        init: the first carry, a tensor or nested containers of tensors.
        xs: a tensor or nested containers of tensors, with one first dimension.
        partition_fn: not looked at; what the backward pass needs is kept.
        is_fn_pure: not looked at.

    Returns:
        The last carry, and the ``y`` stacked along a new first dimension.
    """
    from torch._dynamo import dont_skip_tracing  # a second to import
    from torch._higher_order_ops.scan import scan as torch_scan

    def step(carry: Any, x: Any) -> Any:  # torch refuses a result that is an argument
        return torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.clone, fn(carry, x))

    with dont_skip_tracing():  # Dynamo passes over functions of this package
        carry, ys = torch_scan(step, init, xs)
    return carry, ys


__all__ = ["scan"]
