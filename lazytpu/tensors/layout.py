"""How a tensor lies in its storage, and by which view op it came from its parent.

A storage holds one array of a *root* layout.  A view op makes a child layout, remembered under the
op and its arguments, so the same view taken again is one dictionary look-up.  Layouts are interned:
two tensors with the same geometry on the same root have the same layout object.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from math import prod
from typing import cast

import torch

from lazytpu.ir.op_schema import Arg, Op
from lazytpu.ir.types import Size, TensorType, contiguous_stride, memory_order, overlaps

Geometry = tuple[Size, Size, int, torch.dtype, int]  # the last: CONJ | NEG
CONJ, NEG = 1, 2

# A layout whose views keep changing (a sliding window over a data set) forgets them past this number.
MAX_CHILDREN = 4096

_roots: dict[tuple[Size, Size, torch.dtype], Layout] = {}


class Layout(TensorType):
    """The type of a tensor, its offset in its storage (in elements) and the way there from the storage's own layout.

    ``bits`` are torch's lazy conjugate and negative bits: a tensor that has one reads as the conjugate
    or negative of what is stored.

    Attributes:
        root: the layout of the whole storage; itself for a root.
        parent: the layout the view op was applied to; None for a root.
        op: the view op (an `Op`, or the name of one) that leads from ``parent`` here, with ``args``.
        overlapping: two indices may reach one element of memory, here or in a layout on the way to the root.
        children: view op and arguments to the layout (or tuple of layouts) it gives.
        read_key: the key of the node that reads it, without the value that it reads; None before the first read.
    """

    __slots__ = (
        "args",
        "bits",
        "by_geometry",
        "children",
        "offset",
        "op",
        "overlapping",
        "parent",
        "read_key",
        "root",
    )
    __setattr__ = object.__setattr__

    args: tuple[Arg, ...]
    bits: int
    by_geometry: dict[Geometry, Layout]
    children: dict[Hashable, Layout | tuple[Layout, ...]]
    offset: int
    op: Op | str
    overlapping: bool
    parent: Layout | None
    read_key: tuple[Hashable, tuple[Hashable, ...]] | None
    root: Layout

    def __init__(self, size: Size, stride: Size, offset: int, dtype: torch.dtype, bits: int = 0) -> None:
        super().__init__(size, stride, dtype)
        self.offset, self.bits = offset, bits
        self.overlapping = overlaps(size, stride)
        self.children, self.by_geometry, self.read_key = {}, {}, None
        self.root, self.parent, self.op, self.args = self, None, "", ()

    @property
    def geometry(self) -> Geometry:
        """Sizes, strides, offset, dtype and lazy conjugate and negative bits."""
        return self.size, self.stride, self.offset, self.dtype, self.bits

    def child(self, op: Op | str, args: tuple[Arg, ...], geometry: Geometry) -> Layout:
        """Return the interned layout of this geometry on this root, reached by ``op(self, *args)`` if it is new."""
        known = self.root.geometry_layout(geometry)
        if known is not None:
            return known
        made = Layout(*geometry)
        made.root, made.parent, made.op, made.args = self.root, self, op, args
        made.overlapping = made.overlapping or self.overlapping
        if len(self.root.by_geometry) >= MAX_CHILDREN:
            self.root.by_geometry.clear()
        self.root.by_geometry[geometry] = made
        return made

    def geometry_layout(self, geometry: Geometry) -> Layout | None:
        """Return the layout of this geometry on this root, if there is one."""
        return self if geometry == self.geometry else self.by_geometry.get(geometry)

    def child_at(self, geometry: Geometry) -> Layout:
        """Return the layout of this geometry on this root, whatever view ops led there."""
        known = self.root.geometry_layout(geometry)
        if known is not None:
            return known
        size, stride, offset, dtype, bits = geometry
        if bits & CONJ:
            return self.child_at((size, stride, offset, dtype, bits & ~CONJ)).child("_conj", (), geometry)
        if bits & NEG:
            return self.child_at((size, stride, offset, dtype, 0)).child("_neg_view", (), geometry)
        flat = self.flat()
        if dtype != flat.dtype:
            numel = flat.size[0] * flat.dtype.itemsize // dtype.itemsize
            whole = numel * dtype.itemsize // flat.dtype.itemsize
            if whole != flat.size[0]:  # the last bytes are not enough for an element
                flat = flat.child("as_strided", ((whole,), (1,), 0), ((whole,), (1,), 0, flat.dtype, 0))
            flat = flat.child("view_dtype", (dtype,), ((numel,), (1,), 0, dtype, 0))
        return flat.child("as_strided", (size, stride, offset), geometry)

    def flat(self) -> Layout:
        """Return the whole storage as a vector in memory order: ``permute`` and ``view`` of the root."""
        root = self.root
        if root.contiguous and len(root.size) == 1:
            return root
        ordered, order = root, memory_order(root)
        if not root.contiguous:
            size, stride = tuple(root.size[d] for d in order), tuple(root.stride[d] for d in order)
            ordered = root.child("permute", (order,), (size, stride, 0, root.dtype, 0))
        size = (prod(root.size),)
        return ordered.child("view", (size,), (size, (1,), 0, root.dtype, 0))

    def remember(self, key: Hashable, result: Layout | tuple[Layout, ...]) -> None:
        """Store the layout(s) that the view op and arguments of ``key`` give."""
        if len(self.children) >= MAX_CHILDREN:
            self.children.clear()
        self.children[key] = result


def root_layout(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Layout:
    """Return the interned layout of a whole storage.  ``stride`` must be dense (a permutation of row-major)."""
    key = (tuple(size), tuple(stride), dtype)
    found = _roots.get(key)
    if found is None:
        found = _roots[key] = Layout(*key[:2], 0, dtype)
    return found


def in_rows(size: Sequence[int], dtype: torch.dtype) -> Layout:
    """Return the layout of a whole storage in row-major order."""
    return root_layout(size, contiguous_stride(size), dtype)


def layout_of(type_: TensorType) -> Layout:
    """Return the layout that a type is: whatever makes values gives them interned layouts."""
    return cast(Layout, type_)


def geometry_of(tensor: torch.Tensor) -> Geometry:
    """Return the geometry of a tensor in its storage, as torch sees it."""
    bits = CONJ * tensor.is_conj() + NEG * tensor.is_neg()
    return tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype, bits
