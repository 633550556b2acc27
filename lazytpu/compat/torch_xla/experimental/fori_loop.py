"""``torch_xla.experimental.fori_loop``: loops that are one op on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lazytpu.compat import lacking

__getattr__ = lacking.names_of(__name__)


def while_loop(
    cond_fn: Callable[..., Any],
    body_fn: Callable[..., Any],
    carried_inputs: tuple[Any, ...],
    additional_inputs: tuple[Any, ...] | None = None,
) -> Any:
    """``torch._higher_order_ops.while_loop``; both functions also get the ``additional_inputs``, which stay."""
    from torch._dynamo import dont_skip_tracing  # a second to import
    from torch._higher_order_ops.while_loop import while_loop as torch_while_loop

    more = tuple(additional_inputs or ())
    with dont_skip_tracing():  # Dynamo passes over functions of this package
        return torch_while_loop(lambda *c: cond_fn(*c, *more), lambda *c: body_fn(*c, *more), tuple(carried_inputs))


def fori_loop(lower: torch.Tensor, upper: torch.Tensor, body_fun: Callable[..., Any], *input_value: Any) -> Any:
    """Calls ``body_fun`` on its own result ``upper - lower`` times.

    Args:
        lower, upper: integer tensors without dimensions, or of one element.
        body_fun: takes the values and gives a tensor, or as many as it takes.
        input_value: the first values.

    Returns:
        A tuple of the count that is left, zero, and the values.
    """

    def step(left: Any, *values: Any) -> Any:
        made = body_fun(*values)
        return left - 1, *(made if isinstance(made, (tuple, list)) else (made,))

    return while_loop(lambda left, *_: (left > 0).reshape(()), step, (upper - lower, *input_value))


__all__ = ["fori_loop", "while_loop"]
