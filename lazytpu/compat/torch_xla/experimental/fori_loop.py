"""``torch_xla.experimental.fori_loop``: loops that are one op on the device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch._dynamo import dont_skip_tracing
from torch._higher_order_ops.while_loop import while_loop as torch_while_loop

from lazytpu.compat import names

__getattr__ = names.missing_from(__name__)


def while_loop(
    cond_fn: Callable[..., torch.Tensor],
    body_fn: Callable[..., object],
    carried_inputs: tuple[torch.Tensor, ...],
    additional_inputs: tuple[torch.Tensor, ...] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Call torch's ``while_loop``; both functions also get the ``additional_inputs``, which do not change."""
    more = tuple(additional_inputs or ())
    with dont_skip_tracing():  # Dynamo passes over functions of this package
        found = torch_while_loop(lambda *c: cond_fn(*c, *more), lambda *c: body_fn(*c, *more), tuple(carried_inputs))
    return tuple(found)


def fori_loop(
    lower: torch.Tensor,
    upper: torch.Tensor,
    body_fun: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]],
    *input_value: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Call ``body_fun`` on its own result ``upper - lower`` times.

    Args:
        lower, upper: integer tensors without dimensions, or of one element.
        body_fun: takes the values and returns a tensor, or as many as it takes.
        input_value: the first values.

    Returns:
        The remaining count, zero, and the values.
    """

    def step(left: torch.Tensor, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = body_fun(*values)
        return left - 1, *(made if isinstance(made, (tuple, list)) else (made,))

    return while_loop(lambda left, *_: (left > 0).reshape(()), step, (upper - lower, *input_value))
