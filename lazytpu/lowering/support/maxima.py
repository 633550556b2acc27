"""Maxima: those that are subtracted before an exponential, and those of many elements."""

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from lazytpu.lowering.registry import on_one_cpu

_LANES = 32
_LARGE = 1 << 16  # elements from which on a second loop is worth its start
_LONG = 256


def shift(x, axes, keepdims=False):
    """Return the maximum of the numbers along some axes, to subtract before an exponential; -inf where there are none.

    XLA's own maximum takes NaN on, and on CPUs its loop over a row takes twice as long as one that only compares.  Here
    it need not: the exponential of NaN is NaN.  For gradients that jax computes it is a constant.
    """
    axes = tuple(a % x.ndim for a in (axes if isinstance(axes, (tuple, list)) else (axes,)))
    x = lax.stop_gradient(x)
    if not (on_one_cpu() and jnp.issubdtype(x.dtype, jnp.floating)):
        return jnp.max(x, axes, keepdims=keepdims, initial=-jnp.inf)
    found = lax.reduce(x, np.array(-np.inf, x.dtype), lambda a, b: lax.select(lax.gt(a, b), a, b), axes)
    return lax.expand_dims(found, axes) if keepdims else found


def extreme(x, axes, largest):
    """Return the maximum or the minimum over some axes; NaN where there is one.

    On CPUs over the last axes lane by lane: XLA's loop over a row compares one element after the other, in five to ten
    times the time.
    """
    reduce = lax.reduce_max if largest else lax.reduce_min
    axes = sorted(axes)
    terms = math.prod(x.shape[a] for a in axes)
    last = axes == [*range(x.ndim - len(axes), x.ndim)]
    if on_one_cpu() and last and x.size >= _LARGE and terms >= _LONG and terms % _LANES == 0:
        kept = x.shape[: x.ndim - len(axes)]
        x = lax.optimization_barrier(reduce(x.reshape(*kept, terms // _LANES, _LANES), (len(kept),)))
        axes = [len(kept)]
    return reduce(x, axes)
