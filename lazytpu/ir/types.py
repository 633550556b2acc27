"""The type of an array: sizes, strides and dtype; and what follows from sizes and strides alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from lazytpu.dtypes import short_name, type_name

Size = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class TensorType:
    """The type of a value.  Identity is equality: types are interned (`lazytpu.tensors.layout.root_layout`).

    Attributes:
        size, stride: in elements.
        contiguous: row-major without gaps.
        as_created: has the strides that ``create_empty_tensor`` gives this size.
    """

    size: Size
    stride: Size
    dtype: torch.dtype
    contiguous: bool = field(init=False)
    as_created: bool = field(init=False)

    def __post_init__(self) -> None:
        size, stride = self.size, self.stride
        object.__setattr__(self, "contiguous", prod(size) == 0 or _row_major(size, stride))
        object.__setattr__(self, "as_created", all(st == prod(size[i + 1 :]) for i, st in enumerate(stride)))

    def __repr__(self) -> str:
        return type_name(self.size, self.dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements, each once."""
        return prod(self.size) * self.dtype.itemsize

    def describe(self) -> str:
        """Return ``f32[64,10]``, with the strides where they are not row-major."""
        strides = "" if self.contiguous else f"{{{','.join(map(str, self.stride))}}}"
        return f"{short_name(self.dtype)}[{','.join(map(str, self.size))}]{strides}"


def contiguous_stride(size: Sequence[int]) -> Size:
    """Row-major strides, as torch gives them (a size of 0 counts as 1)."""
    stride, step = [], 1
    for n in reversed(size):
        stride.append(step)
        step *= max(n, 1)
    return tuple(reversed(stride))


def is_dense(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether the elements fill memory without gaps or overlap, in some order of the dimensions."""
    if prod(size) == 0:
        return True
    expected = 1
    for st, n in sorted((st, n) for st, n in zip(stride, size, strict=True) if n != 1):
        if st != expected:
            return False
        expected *= n
    return True


def overlaps(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Return whether two indices may reach one element: no order of the dimensions nests them without overlap."""
    if prod(size) == 0:
        return False
    last = 0  # the furthest element that the dimensions so far reach
    for st, n in sorted((st, n) for st, n in zip(stride, size, strict=True) if n != 1):
        if st <= last:
            return True
        last += st * (n - 1)
    return False


def memory_order(layout: TensorType) -> Size:
    """Return the permutation of dimensions that puts a dense layout in row-major order."""
    return tuple(sorted(range(len(layout.size)), key=lambda d: (-layout.stride[d], -layout.size[d], d)))


def _row_major(size: Size, stride: Size) -> bool:
    """Row-major where dimensions of length 1 may have any stride."""
    expected = 1
    for n, st in zip(reversed(size), reversed(stride), strict=True):
        if n != 1:
            if st != expected:
                return False
            expected *= n
    return True
