"""Rounding to small integers: symmetric, so that zero stays zero and padding with zeros is exact.

A float ``x`` is ``scale * q`` with ``q`` from ``-(2 ** (bits - 1) - 1)`` to the same above zero.
"""

from __future__ import annotations

import torch

from lazytpu.dispatch.general import functional
from lazytpu.lowering.rules import integer_products

DTYPES = {8: torch.int8, 16: torch.int16}
_SMALLEST = torch.finfo(torch.float32).tiny

integer_linear = torch.ops.lazytpu.integer_linear
integer_conv = torch.ops.lazytpu.integer_conv
for _op in (integer_linear, integer_conv):
    integer_products.library.impl(_op.default._schema.name, functional(_op.default), "PrivateUse1")


def top(bits: int) -> int:
    """Return the largest integer of that many bits."""
    return (1 << (bits - 1)) - 1


def largest(x: torch.Tensor, keep: int | None = None) -> torch.Tensor:
    """Return the largest magnitude in ``x``: of all of it, or for each place along dimension ``keep``."""
    if keep is None:
        return x.detach().abs().amax()
    others = [d for d in range(x.dim()) if d != keep % x.dim()]
    return x.detach().abs().amax(others) if others else x.detach().abs()


def scale_for(amax: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the scale with which ``amax`` becomes the largest integer (float32, never zero)."""
    return (amax.float() / top(bits)).clamp_min(_SMALLEST)


def at_least_float32(x: torch.Tensor) -> torch.Tensor:
    """``x``, in float32 where it has fewer bits: a scale may be too small for float16."""
    return x if x.dtype.itemsize >= 4 else x.float()


def to_integers(x: torch.Tensor, scale: torch.Tensor, bits: int) -> torch.Tensor:
    """``x / scale``, rounded to even and kept in range, as int8 or int16; computed in float32 at least."""
    limit = top(bits)
    return (at_least_float32(x) / scale).round().clamp(-limit, limit).to(DTYPES[bits])


def along(scale: torch.Tensor, dim: int, rank: int) -> torch.Tensor:
    """Return a scale [n] shaped to lie along dimension ``dim`` of a tensor of that rank; a scale of one stays."""
    return scale if scale.dim() == 0 else scale.reshape([-1 if d == dim else 1 for d in range(rank)])


def group_for(size: int, group: int) -> int:
    """Return the largest even divisor of ``size`` from ``group`` down to 16, or ``group`` itself, or 0."""
    wanted = range(group, min(16, group) - 1, -1)
    return next((n for n in wanted if n % 2 == 0 and size % n == 0), 0)


def pack_int4(q: torch.Tensor) -> torch.Tensor:
    """Return pairs of integers from -7 to 7 along the last dimension, of even size, as one uint8, the first low."""
    low, high = (q[..., 0::2] + 8).to(torch.uint8), (q[..., 1::2] + 8).to(torch.uint8)
    return low | (high << 4)


def unpack_int4(packed: torch.Tensor) -> torch.Tensor:
    """Return the int8 integers that `pack_int4` packed."""
    pair = torch.stack((packed & 15, packed >> 4), -1).to(torch.int8) - 8
    return pair.reshape(*packed.shape[:-1], -1)
