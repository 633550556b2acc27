"""Maxima that are subtracted before an exponential."""

import jax.numpy as jnp
import numpy as np
from jax import lax

from lazytpu.lowering.registry import on_one_cpu


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
