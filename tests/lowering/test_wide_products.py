"""Products of 64-bit integers as TPUs get them: sums of what is multiplied element by element."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from lazytpu.lowering.registry import lowering_for
from lazytpu.lowering.support import wide_products

DIMS = {
    "matrices": ((4, 5), (5, 3), (((1,), (0,)), ((), ()))),
    "batches that stand elsewhere": ((4, 2, 5), (5, 3, 2), (((2,), (0,)), ((1,), (2,)))),
    "two dimensions summed over": ((4, 5, 6), (6, 5), (((1, 2), (1, 0)), ((), ()))),
    "vectors": ((5,), (5,), (((0,), (0,)), ((), ()))),
}


@pytest.mark.parametrize("name", DIMS)
def test_it_is_the_product_modulo_two_to_the_64(name: str) -> None:
    size_a, size_b, dims = DIMS[name]
    generator = np.random.default_rng(0)
    with jax.enable_x64(True):
        a, b = (jnp.asarray(generator.integers(-(2**62), 2**62, size)) for size in (size_a, size_b))
        with lowering_for("tpu"):
            text = jax.jit(lambda a, b: wide_products.dot(a, b, dims, a.dtype)).lower(a, b).as_text()
            found = wide_products.dot(a, b, dims, a.dtype)
        assert "dot_general" not in text
        assert np.array_equal(found, lax.dot_general(a, b, dims))
