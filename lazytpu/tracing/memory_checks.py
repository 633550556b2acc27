"""Memory checks: raise what eager torch raises for tensors that an op writes to.

Whether an op may write to memory that overlaps, and what it makes of a tensor given as ``out=``, differs from op to
op.  Torch is asked once for each op and `aliasing_signature`, on sample tensors that share memory as the given ones do.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from lazytpu.ir.op_schema import OpOverload
from lazytpu.tensors.storage import Alias, Storage, resolve, storage_of
from lazytpu.tracing.record import cell_of, is_device_tensor
from lazytpu.tracing.sample_tensors import call_with_samples, error_of, named_arguments

_OVERLAP = ("unsupported operation: ", "must not overlap")  # pieces of torch's errors about overlapping memory
_MAX_ACCEPTED = 4096
_accepted: dict[object, None] = {}  # what was checked, of which op, and its signature


def may_alias(written: Sequence[object], read: Iterable[object], *, pointwise: bool) -> bool:
    """Return whether memory that an op writes may be reached in another way: by the same tensor, or by another one.

    Args:
        written, read: the tensors among the arguments, other things are passed over.
        pointwise: an element that is read depends on no other, so reading the very tensor that is written is safe.
    """
    cells = [cell_of(t) for t in written if is_device_tensor(t)]
    storages = {storage_of(cell) for cell in cells}
    if len(storages) < len(cells) or any(type(cell) is Alias and cell.layout.overlapping for cell in cells):
        return True
    others = [cell_of(t) for t in read if is_device_tensor(t)]
    if storages.isdisjoint([storage_of(cell) for cell in others]):
        return False
    return not pointwise or any(storage_of(cell) in storages and cell not in cells for cell in others)


def check_overlap(overload: OpOverload, args: Sequence[object], kwargs: dict[str, object]) -> None:
    """Raise torch's error where an op must not write to memory that `may_alias`."""
    key = ("overlap", overload, aliasing_signature((args, kwargs)))
    if key not in _accepted:
        error = error_of(overload, named_arguments(overload, args, kwargs))
        if error is not None and any(piece in str(error) for piece in _OVERLAP):
            raise type(error)(str(error))
        _accept(key)


def check_outputs(
    overload: OpOverload, functional: OpOverload, args: Sequence[object], kwargs: dict[str, object], outs: Iterable[str]
) -> None:
    """Raise what torch raises for tensors given as ``out=``, of a dtype that cannot hold the result for example.

    Args:
        overload: the op that was called, with ``args`` and ``kwargs``.
        functional: the functional variant, with the same results.
        outs: the names of the arguments that are tensors to write to.
    """
    key = ("outputs", overload, aliasing_signature((args, kwargs)))
    if key not in _accepted:
        named = named_arguments(overload, args, kwargs)
        read = {name: x for name, x in named.items() if name not in outs}
        dtypes = [t.dtype for t in tree_leaves([named[name] for name in outs])]
        if dtypes != _dtypes_on_meta(overload, functional, named, read):  # equal ones are never refused
            error = error_of(overload, named)  # meta kernels word errors differently, and cast where the CPU refuses to
            try:
                if error is not None and error_of(functional, read) is None:  # else it is about what is read
                    raise error
            finally:
                del error  # a cycle of it and this frame would hold the frames that called, and the tensors in them
        _accept(key)


def _dtypes_on_meta(
    overload: OpOverload, functional: OpOverload, named: Mapping[str, object], read: Mapping[str, object]
) -> list[torch.dtype] | None:
    """Return the dtypes of the results, None where the meta kernels do not take the arguments."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a resized output, which whoever resizes it warns of
            call_with_samples(overload, named)
            return [t.dtype for t in tree_leaves(call_with_samples(functional, read))]
    except Exception:
        return None


def aliasing_signature(arguments: object) -> object:
    """Return a key of all that memory checks depend on: which tensors share a storage, and how each lies in it."""
    return _signature(arguments, {}, {})


# Not a function inside: one that calls itself is a reference cycle, which would keep the storages alive.
def _signature(x: Any, storages: dict[Storage, int], tensors: dict[int, int]) -> Any:
    if isinstance(x, (list, tuple)):
        return tuple([_signature(e, storages, tensors) for e in x])
    if isinstance(x, dict):
        return tuple([(k, _signature(v, storages, tensors)) for k, v in x.items()])
    if is_device_tensor(x):
        storage, layout = resolve(cell_of(x))
        same = tensors.setdefault(id(x), len(tensors))
        return same, storages.setdefault(storage, len(storages)), storage.layout, layout.geometry
    if isinstance(x, torch.Tensor):
        return x.dtype, tuple(x.shape)
    return type(x) if isinstance(x, (float, complex)) else (type(x), x)


def _accept(key: object) -> None:
    if len(_accepted) >= _MAX_ACCEPTED:
        _accepted.clear()
    _accepted[key] = None
