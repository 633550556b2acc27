"""Whether a program is defined: watches the ops of its run on the CPU.

Left out are writes whose result follows the order in which a kernel visits the elements (to memory that overlaps
itself, or that is read at another place by the same op), and values so large that rounding would decide.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LIMIT = 30_000.0
_LIMITS = {torch.float16: 500.0, torch.bfloat16: 120.0}
_COPIES = ("copy_", "fill_", "zero_")


class UndefinedError(Exception):
    """The program is not one that torch defines."""


class Watch(TorchDispatchMode):
    """Raises `UndefinedError` in the place of an op whose result is not defined.

    Attributes:
        largest: the largest magnitude of any float so far.
    """

    def __init__(self, magnitudes: bool = True) -> None:
        super().__init__()
        self.largest = 1.0
        self._magnitudes = magnitudes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        if schema.is_mutable:
            self._look_at_write(func, schema, args, kwargs)
        result = func(*args, **kwargs)
        if self._magnitudes:
            for t in tree_leaves(result):
                if isinstance(t, torch.Tensor) and t.numel() and not _is_view_op(schema):
                    self._look_at_values(t)
        return result

    def _look_at_write(self, func: Any, schema: Any, args: Any, kwargs: Any) -> None:
        written, read = [], []
        for i, argument in enumerate(schema.arguments):
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            tensors = [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
            writes = argument.alias_info is not None and argument.alias_info.is_write
            (written if writes else read).extend(tensors)
        if func.overloadpacket.__name__ in ("set_", "resize_", "as_strided_", "detach_") or _is_move(schema):
            return
        for i, t in enumerate(written):
            if overlaps_itself(t):
                raise UndefinedError("a write to memory that overlaps itself")
            if any(share(t, other) for other in written[:i]):
                raise UndefinedError("two writes to the same memory")
            if any(share(t, other) and not _same_place(t, other) for other in read):
                raise UndefinedError("a write to memory that is read at another place")

    def _look_at_values(self, t: torch.Tensor) -> None:
        if t.is_complex():
            t = torch.view_as_real(t.resolve_conj())
        if t.dtype == torch.bool:
            return
        if t.dtype.is_floating_point:
            largest = t.detach().abs().max().item()
            if not largest <= _LIMITS.get(t.dtype, LIMIT):  # NaN too
                raise UndefinedError(f"a value of {largest}")
            self.largest = max(self.largest, largest)
        elif max(abs(int(t.max())), abs(int(t.min()))) > min(torch.iinfo(t.dtype).max // 2 + 1, 1 << 20):
            raise UndefinedError("a large integer")


def _is_view_op(schema: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


def _is_move(schema: Any) -> bool:
    return schema.name.partition("::")[2] in ("t_", "transpose_", "squeeze_", "unsqueeze_", "swapaxes_", "swapdims_")


def _same_place(a: torch.Tensor, b: torch.Tensor) -> bool:
    same_type = a.dtype == b.dtype and a.is_conj() == b.is_conj() and a.is_neg() == b.is_neg()
    return same_type and a.shape == b.shape and a.stride() == b.stride() and a.storage_offset() == b.storage_offset()


def reach(t: torch.Tensor) -> torch.Tensor:
    """How many elements of a tensor reach each byte of its storage."""
    size = t.element_size()
    counts = torch.zeros(t.untyped_storage().nbytes() // size, dtype=torch.int32)
    places = torch.arange(counts.numel()).as_strided(t.shape, t.stride(), t.storage_offset()).flatten()
    counts.index_add_(0, places, torch.ones_like(places, dtype=torch.int32))
    return counts.repeat_interleave(size)


def _storage(t: torch.Tensor) -> int:
    return t.untyped_storage()._cdata


def share(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether an element of one tensor lies over one of the other."""
    if _storage(a) != _storage(b) or not a.numel() or not b.numel():
        return False
    with torch._C._DisableTorchDispatch():
        x, y = reach(a), reach(b)
        n = min(len(x), len(y))
        return bool(((x[:n] > 0) & (y[:n] > 0)).any())


def overlaps_itself(t: torch.Tensor) -> bool:
    """Whether two elements of a tensor lie over each other."""
    if t.is_contiguous() or not t.numel():
        return False
    with torch._C._DisableTorchDispatch():
        return bool((reach(t) > 1).any())
