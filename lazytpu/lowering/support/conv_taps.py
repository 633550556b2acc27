"""The gradient of a convolution's weights as one product for each tap of the window.

As a convolution it has a window as large as the image.  XLA for TPUs takes minutes to compile that in float32, which
takes several products of bfloat16, where it takes seconds for the products of the taps.
"""

import itertools
import math

import jax.numpy as jnp
from jax import lax

MOST_TAPS = 64


def takes(x, kernel, groups):
    """Return whether the gradient of weights with so large a ``kernel`` is better computed by taps on TPUs."""
    return x.dtype == jnp.float32 and groups == 1 and math.prod(kernel) <= MOST_TAPS


def weight_gradient(grad, x, kernel, stride, padding, dilation):
    """Return the gradient of the weights [out, in, *kernel].

    Args:
        grad: of the result [image, out, *places].
        x: the input [image, in, *spatial].
        kernel, stride, padding, dilation: for each dimension.
    """
    places = grad.shape[2:]
    reach = [(n - 1) * s + (k - 1) * d + 1 for n, s, k, d in zip(places, stride, kernel, dilation, strict=True)]
    ends = [max(0, r - n - p) for r, n, p in zip(reach, x.shape[2:], padding, strict=True)]
    padded = lax.pad(
        x, jnp.zeros((), x.dtype), [(0, 0, 0)] * 2 + [(p, e, 0) for p, e in zip(padding, ends, strict=True)]
    )
    over = (0, *range(2, x.ndim))
    taps = []
    for tap in itertools.product(*map(range, kernel)):
        first = [t * d for t, d in zip(tap, dilation, strict=True)]
        last = [f + (n - 1) * s + 1 for f, n, s in zip(first, places, stride, strict=True)]
        seen = lax.slice(padded, (0, 0, *first), (*x.shape[:2], *last), (1, 1, *stride))
        taps.append(lax.dot_general(grad, seen, ((over, over), ((), ()))))
    return jnp.stack(taps, -1).reshape(grad.shape[1], x.shape[1], *kernel)
