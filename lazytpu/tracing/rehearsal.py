"""What torch does to tensors that lie in memory as the given ones do: its own answer, on stand-ins.

Whether an op may write to overlapping memory, and what it makes of a tensor given as ``out=``, differs
from op to op.  Torch is asked once for each op and way to lie, on meta tensors where the meta kernel knows
and on CPU tensors of zeros where it does not, and the answer is kept.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from lazytpu.ir.op_schema import ABSENT, OpOverload
from lazytpu.tensors.layout import Layout
from lazytpu.tensors.storage import Alias, Storage, resolve, storage_of
from lazytpu.tracing.record import cell_of, is_device_tensor
from lazytpu.tracing.refusals import CONTENTS, Contents, zeros

_OVERLAP = "unsupported operation: "  # how torch's errors about overlapping memory begin
_MAX_KNOWN = 4096
_may_overlap: dict[Any, str] = {}  # key to the error, empty where torch allows it
_checked: dict[Any, None] = {}


def call_form(
    overload: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
) -> tuple[Sequence[Any], dict[str, Any]]:
    """The arguments without `ABSENT` ones."""
    if any(x is ABSENT for x in args):
        first = next(i for i, x in enumerate(args) if x is ABSENT)
        names = [a.name for a in overload._schema.arguments]
        kwargs = {**dict(zip(names[first:], args[first:], strict=False)), **kwargs}
        args = args[:first]
    return args, {k: v for k, v in kwargs.items() if v is not ABSENT}


def stand_in(root: Layout, layout: Layout, device: str = "meta", memory: torch.Tensor | None = None) -> torch.Tensor:
    """A tensor that lies as ``layout`` in ``memory``, or in new memory as large as a storage of layout ``root``."""
    if memory is None:
        memory = torch.zeros(root.nbytes, dtype=torch.uint8, device=device)
    tensor = torch.empty(0, dtype=layout.dtype, device=device)
    tensor.set_(memory.untyped_storage(), layout.offset, layout.size, layout.stride)
    if layout.bits & 1:
        tensor = tensor.conj()
    return torch._neg_view(tensor) if layout.bits & 2 else tensor


def entangled(written: Sequence[Any], read: Iterable[Any], *, pointwise: bool) -> bool:
    """Whether memory that an op writes may be reached in another way: by the same tensor, or by another one.

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


def check_overlap(overload: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raises torch's error where an op must not write to memory that is `entangled`."""
    key = (overload, _way_to_lie((args, kwargs)))
    error = _may_overlap.get(key)
    if error is None:
        _make_room(_may_overlap)
        error = _may_overlap[key] = _overlap_error(overload, args, kwargs)
    if error:
        raise RuntimeError(error)


def _overlap_error(overload: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    state = torch.get_rng_state()
    try:
        _rehearse(overload, args, kwargs, "cpu")
    except Exception as error:  # zeros may be out of an op's domain, which says nothing about memory
        return str(error) if str(error).startswith(_OVERLAP) else ""
    finally:
        torch.set_rng_state(state)
    return ""


def check_outputs(
    overload: OpOverload, twin: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], outs: Iterable[str]
) -> None:
    """Raises what torch raises for tensors given as ``out=``, of a dtype that cannot hold the result for example.

    Args:
        overload: the op that was called, with ``args`` and ``kwargs``.
        twin: the functional op of the same results.
        outs: the names of the arguments that are tensors to write to.
    """
    key = (overload, _way_to_lie((args, kwargs)))
    if key in _checked:
        return
    names = [a.name for a in overload._schema.arguments]
    named = {**dict(zip(names, args, strict=False)), **kwargs}
    read = {name: x for name, x in named.items() if name not in outs}
    dtypes = [t.dtype for t in tree_leaves([named[name] for name in outs])]
    state = torch.get_rng_state()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a resized output is warned of by who resizes it
            if dtypes != _dtypes_by_meta(overload, twin, args, kwargs, read):  # equal ones are never refused
                _ask_the_cpu(overload, twin, args, kwargs, read)
    finally:
        torch.set_rng_state(state)
    _make_room(_checked)
    _checked[key] = None


def _dtypes_by_meta(
    overload: OpOverload, twin: OpOverload, args: Any, kwargs: Any, read: dict[str, Any]
) -> list[torch.dtype] | None:
    """The dtypes of the results, if the meta kernels take the arguments."""
    try:
        _rehearse(overload, args, kwargs, "meta")
        return [t.dtype for t in tree_leaves(_rehearse(twin, (), read, "meta"))]
    except Exception:
        return None


def _ask_the_cpu(overload: OpOverload, twin: OpOverload, args: Any, kwargs: Any, read: dict[str, Any]) -> None:
    """Raises the error of the CPU's kernel, if it is about the outputs.

    Meta kernels word their errors differently, and cast where kernels of the CPU refuse to.
    """
    for contents in CONTENTS:
        error = _error_of(overload, args, kwargs, contents)
        if error is None:
            return
        if _error_of(twin, (), read, contents) is None:
            raise error
        # else the inputs are to blame: their types, or contents that are out of the op's domain


def _error_of(overload: OpOverload, args: Any, kwargs: Any, contents: Contents) -> Exception | None:
    try:
        _rehearse(overload, args, kwargs, "cpu", contents)
    except Exception as error:
        return error.with_traceback(None)
    return None


def _rehearse(overload: OpOverload, args: Any, kwargs: Any, device: str, contents: Contents = zeros) -> Any:
    """Calls an op with stand-ins that share memory as the tensors do, and returns its results."""
    memories: dict[Storage, torch.Tensor] = {}
    made: dict[int, torch.Tensor] = {}

    def replace(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return [replace(e) for e in x]
        if not isinstance(x, torch.Tensor):
            return torch.device(device) if isinstance(x, torch.device) else x
        if id(x) not in made:
            if is_device_tensor(x):
                storage, layout = resolve(cell_of(x))
                if storage not in memories:
                    memories[storage] = stand_in(storage.layout, storage.layout, device)
                made[id(x)] = stand_in(storage.layout, layout, device, memories[storage])
            else:
                made[id(x)] = torch.zeros_like(x, device=device)
            contents(made[id(x)])
        return made[id(x)]

    args, kwargs = call_form(overload, args, kwargs)
    with torch.no_grad(), torch._C.DisableTorchFunction():
        return overload(*replace(args), **{k: replace(v) for k, v in kwargs.items()})


def _way_to_lie(arguments: Any) -> Any:
    """A key of all that a rehearsal depends on: for tensors, which share a storage and how each lies in it."""
    storages: dict[Storage, int] = {}
    tensors: dict[int, int] = {}

    def key(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return tuple([key(e) for e in x])
        if isinstance(x, dict):
            return tuple([(k, key(v)) for k, v in x.items()])
        if is_device_tensor(x):
            storage, layout = resolve(cell_of(x))
            same = tensors.setdefault(id(x), len(tensors))
            return same, storages.setdefault(storage, len(storages)), storage.layout, layout.geometry
        if isinstance(x, torch.Tensor):
            return x.dtype, tuple(x.shape)
        return type(x) if isinstance(x, (float, complex)) else (type(x), x)

    return key(arguments)


def _make_room(known: dict[Any, Any]) -> None:
    if len(known) >= _MAX_KNOWN:
        known.clear()
