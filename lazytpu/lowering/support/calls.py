"""Functions that XLA's CPU compiler compiles apart from what surrounds their calls."""

from collections.abc import Callable, Hashable
from functools import lru_cache, partial

import jax
from jax.experimental.xla_metadata import set_xla_metadata

from lazytpu.lowering.registry import on_one_cpu


def apart(function: Callable[..., object], *fixed: Hashable) -> Callable[..., object]:
    """Return ``partial(function, *fixed)``, whose calls XLA does not put into the caller on one CPU.

    What it is given and what it returns are in memory then.  In the body of a loop that pays for arithmetic on parts of
    a slice: fused with the slice, XLA's loop is not vectorized.  Arrays of equal types are traced once.
    """
    if not on_one_cpu():
        return partial(function, *fixed)
    jitted = _jitted(function, fixed)

    def call(*arguments: object) -> object:
        with set_xla_metadata(inlineable="false"):
            return jitted(*arguments)

    return call


@lru_cache(256)
def _jitted(function: Callable[..., object], fixed: tuple[Hashable, ...]) -> Callable[..., object]:
    def inside(*arguments: object) -> object:
        with set_xla_metadata(inlineable=None):
            return function(*fixed, *arguments)

    inside.__name__ = function.__name__.strip("_")  # which the names of its HLO begin with
    return jax.jit(inside)
