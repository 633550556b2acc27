"""``torch_xla.experimental.scan``: torch's own scan, which is one loop on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, TypeVar

import torch
from torch._dynamo import dont_skip_tracing
from torch._higher_order_ops.scan import scan as torch_scan
from torch.utils._pytree import tree_map_only

from lazytpu.compat import names

__getattr__ = names.missing_from(__name__)


Carry = TypeVar("Carry")
Pytree: TypeAlias = object


def scan(
    fn: Callable[[Carry, Pytree], tuple[Carry, Pytree]],
    init: Carry,
    xs: Pytree,
    partition_fn: Callable[..., object] | None = None,
    is_fn_pure: bool = False,
) -> tuple[Carry, Pytree]:
    """Apply ``fn(carry, x) -> (carry, y)`` along the first dimension of the tensors in ``xs``, with gradients.

    Args:
        fn: the step; tensors that it reads besides its arguments get gradients too.
        init: the first carry, a pytree of tensors.
        xs: a pytree of tensors with the same first dimension.
        partition_fn: ignored; what the backward pass needs is kept.
        is_fn_pure: ignored.

    Returns:
        The last carry, and the ``y`` stacked along a new first dimension.
    """

    def step(carry: Carry, x: Pytree) -> tuple[Carry, Pytree]:  # torch refuses a result that is an argument
        made: tuple[Carry, Pytree] = tree_map_only(torch.Tensor, torch.Tensor.clone, fn(carry, x))
        return made

    with dont_skip_tracing():  # Dynamo passes over functions of this package
        carry, ys = torch_scan(step, init, xs)
    return carry, ys
