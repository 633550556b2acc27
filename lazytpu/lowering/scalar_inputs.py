"""The numbers from Python that a graph takes: three arrays, of which each op takes its elements."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import jax
import jax.numpy as jnp
import torch
from jax import lax

from lazytpu.dtypes import to_numpy
from lazytpu.ir.tree import Number


class ScalarInputs:
    """The elements of a call's scalar arrays; those that are one number (`Graph.uniform`) are one array."""

    def __init__(self, arrays: Mapping[str, jax.Array | None], first: Mapping[tuple[str, int], int]) -> None:
        self.arrays, self._first = arrays, first
        self._taken: dict[Hashable, jax.Array] = {}

    def __getitem__(self, number: Number) -> jax.Array:
        index = self._first.get((number.kind, number.index), number.index)
        key = (number.kind, index, number.dtype)
        if key not in self._taken:
            self._taken[key] = self._element(self.arrays[number.kind], index, number.dtype)
        return self._taken[key]

    @staticmethod
    def _element(array: jax.Array | None, index: int, dtype: object) -> jax.Array:
        assert array is not None
        if dtype == "rng":
            return lax.bitcast_convert_type(lax.slice(array, (index,), (index + 2,)), jnp.uint64)
        x = lax.index_in_dim(array, index, keepdims=False)
        if dtype is bool:
            return x != 0
        return x.astype(to_numpy(dtype)) if isinstance(dtype, torch.dtype) else x
