"""Torch dtypes, their XLA counterparts and the one short name each has in every printout."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch

_TABLE: tuple[tuple[torch.dtype, Any, str], ...] = (
    (torch.float32, np.float32, "f32"),
    (torch.float64, np.float64, "f64"),
    (torch.float16, np.float16, "f16"),
    (torch.bfloat16, ml_dtypes.bfloat16, "bf16"),
    (torch.int64, np.int64, "i64"),
    (torch.int32, np.int32, "i32"),
    (torch.int16, np.int16, "i16"),
    (torch.int8, np.int8, "i8"),
    (torch.uint8, np.uint8, "u8"),
    (torch.uint16, np.uint16, "u16"),
    (torch.uint32, np.uint32, "u32"),
    (torch.uint64, np.uint64, "u64"),
    (torch.bool, np.bool_, "bool"),
    (torch.complex64, np.complex64, "c64"),
    (torch.complex128, np.complex128, "c128"),
    (torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn, "f8e4m3fn"),
    (torch.float8_e5m2, ml_dtypes.float8_e5m2, "f8e5m2"),
    (torch.float8_e4m3fnuz, ml_dtypes.float8_e4m3fnuz, "f8e4m3fnuz"),
    (torch.float8_e5m2fnuz, ml_dtypes.float8_e5m2fnuz, "f8e5m2fnuz"),
)

_TO_NUMPY: dict[torch.dtype, np.dtype] = {t: np.dtype(j) for t, j, _ in _TABLE}
_TO_TORCH: dict[np.dtype, torch.dtype] = {n: t for t, n in _TO_NUMPY.items()}
_SHORT: dict[torch.dtype, str] = {t: s for t, _, s in _TABLE}

# XLA has no complex type of half precision: it is carried as complex64, rounded after every op.
_TO_NUMPY[torch.complex32] = np.dtype(np.complex64)
_SHORT[torch.complex32] = "c32"


HALVES = frozenset({torch.bfloat16, torch.float16})  # numbers that are computed in float32


def supported() -> set[torch.dtype]:
    """Return the dtypes that have a counterpart in XLA."""
    return set(_TO_NUMPY)


def to_numpy(dtype: torch.dtype) -> np.dtype:
    """Return the numpy (and jax) dtype of a torch dtype.

    Raises:
        TypeError: the dtype has no XLA counterpart (quantized types).
    """
    try:
        return _TO_NUMPY[dtype]
    except KeyError:
        raise TypeError(f"{dtype} has no counterpart in XLA") from None


def to_torch(dtype: object) -> torch.dtype:
    """Return the torch dtype of a numpy or jax dtype.

    Raises:
        TypeError: torch has no such dtype.
    """
    try:
        return _TO_TORCH[np.dtype(dtype)]  # type: ignore[call-overload]
    except KeyError:
        raise TypeError(f"{dtype} has no counterpart in torch") from None


def host_array(tensor: torch.Tensor, *, copy: bool = True) -> np.ndarray[Any, Any]:
    """Return a tensor's contents as a row-major numpy array of XLA's dtype for them.

    Args:
        copy: into new memory; else the array shares the memory of a tensor on the CPU that is row-major itself.
    """
    host = tensor.detach().cpu().resolve_conj().resolve_neg()
    host = host.to(torch.complex64) if host.dtype is torch.complex32 else host
    wanted = to_numpy(host.dtype)
    if not host.numel():
        return np.empty(tuple(host.shape), wanted)
    flat = host.contiguous().as_strided((host.numel(),), (1,))  # `view` could keep another stride of one element
    raw = np.from_dlpack(flat.view(torch.uint8))  # `numpy()` would forbid the user to resize the tensor
    return (np.array(raw, copy=True) if copy else raw).view(wanted).reshape(tuple(host.shape))


def host_tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Return a tensor with the contents, and if it is row-major the memory, of an array, which may be read-only."""
    dtype = to_torch(array.dtype)
    if not array.size:
        return torch.empty(array.shape, dtype=dtype)
    raw = torch.from_numpy(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return raw.view(dtype).reshape(array.shape)


def short_name(dtype: torch.dtype) -> str:
    """``f32`` for ``torch.float32``: the name used in the IR, in errors, logs and docs."""
    return _SHORT.get(dtype) or str(dtype).removeprefix("torch.")


def type_name(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """``f32[64,10]``."""
    return f"{short_name(dtype)}[{','.join(map(str, shape))}]"
