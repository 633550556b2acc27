"""Arrays as ``.npy`` bytes.

Types that numpy does not have (bfloat16, float8) are written as integers of the same size; whoever reads them knows
the type from elsewhere.
"""

from __future__ import annotations

import io
import re

import numpy as np
from jax import numpy as jnp
from numpy.typing import NDArray


def to_npy(array: NDArray[np.generic]) -> bytes:
    """Return the contents as a file of numpy's."""
    array = np.ascontiguousarray(array).reshape(array.shape)
    if array.dtype.kind == "V" or array.dtype.isbuiltin != 1:
        array = array.view(f"u{array.dtype.itemsize}")
    out = io.BytesIO()
    np.save(out, array, allow_pickle=False)
    return out.getvalue()


def from_npy(data: bytes, dtype: str, shape: tuple[int, ...]) -> NDArray[np.generic]:
    """Return what `to_npy` wrote.

    Raises:
        ValueError: it has another type or shape, or is a pickle, which is never read.
    """
    array: NDArray[np.generic] = np.load(io.BytesIO(data), allow_pickle=False)
    wanted = np.dtype(jnp.dtype(dtype))
    stored = np.dtype(f"u{wanted.itemsize}") if wanted.kind == "V" or wanted.isbuiltin != 1 else wanted
    if array.dtype != stored or array.shape != shape:
        raise ValueError(f"an array is {array.dtype}{list(array.shape)}, and should be {dtype}{list(shape)}")
    return array.view(wanted)


def file_name(position: int, name: str) -> str:
    """Return a name for the file of a weight that no file system minds."""
    return f"weights/{position:04d}-{re.sub(r'[^A-Za-z0-9_.-]', '_', name)[:80]}.npy"
