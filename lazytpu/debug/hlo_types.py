"""Types of HLO as printed: ``f32[128,256]{1,0:T(8,128)S(1)}``, or a tuple of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import prod

_TYPE = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,<=]*)\](?:\{([^{}]*)\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_WIDTHS = {"pred": 8, "token": 0, "opaque": 0}
_BITS = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class ArrayType:
    """An array.

    Attributes:
        dtype: ``f32``.
        shape: sizes.
        space: where it lies: 0 is the memory of the device, others are smaller memories inside the chip.
    """

    dtype: str
    shape: tuple[int, ...]
    space: int = 0

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes, without the padding of a layout in tiles."""
        return self.elements * bits_of(self.dtype) // 8


def bits_of(dtype: str) -> int:
    """Return the bits of an element: 32 of ``f32``, 16 of ``bf16``, 8 of ``f8e4m3fn``, 8 of ``pred``."""
    if dtype in _WIDTHS:
        return _WIDTHS[dtype]
    found = _BITS.search(dtype)
    return int(found[0]) if found else 0


def arrays_of(text: str) -> list[ArrayType]:
    """Return the arrays of a type: one, or those of a tuple in order."""
    found = []
    for dtype, sizes, layout in _TYPE.findall(text):
        space = _SPACE.search(layout)
        shape = tuple([int(n.lstrip("<=")) for n in sizes.split(",") if n])
        found.append(ArrayType(dtype, shape, int(space[1]) if space else 0))
    return found
