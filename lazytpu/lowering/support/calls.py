"""Functions that XLA's CPU compiler compiles apart from what surrounds their calls."""

from collections.abc import Callable

import jax
from jax.experimental.xla_metadata import set_xla_metadata

from lazytpu.lowering.registry import on_one_cpu


def apart(function: Callable[..., object]) -> Callable[..., object]:
    """Return a function of arrays whose calls XLA does not put into the caller, on one CPU.

    What it is given and what it returns are in memory then.  In the body of a loop that pays for arithmetic on parts of
    a slice: fused with the slice, XLA's loop over the elements is not vectorized.
    """
    if not on_one_cpu():
        return function

    @jax.jit
    def inside(*arguments: object) -> object:
        with set_xla_metadata(inlineable=None):
            return function(*arguments)

    def call(*arguments: object) -> object:
        with set_xla_metadata(inlineable="false"):
            return inside(*arguments)

    return call
