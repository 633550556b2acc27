"""Give tensors a sharding."""

from __future__ import annotations

import torch

from lazytpu.errors import LazyTPUError
from lazytpu.ir.op_schema import op_of
from lazytpu.ir.sharding import OPEN, Entry, Mesh, Sharding, interned, named_sharding, sharding
from lazytpu.ir.tree import Value, operands, trace
from lazytpu.location import site
from lazytpu.lowering.rules.sharding import library, shard_op
from lazytpu.runtime import meshes
from lazytpu.tensors.layout import Layout, layout_of
from lazytpu.tensors.storage import Storage, cell_at, resolve, write_buffer
from lazytpu.tensors.tensor import make
from lazytpu.tensors.unsent import Unsent
from lazytpu.tracing import shardings_kept
from lazytpu.tracing.mesh_of_step import on_mesh
from lazytpu.tracing.record import cell_of, load, lock, record
from lazytpu.tracing.transaction import Transaction

_SHARD = op_of(shard_op)
_MOST_VALUES = 1000  # that `of_examples` looks at


def mark(tensor: torch.Tensor, mesh: Mesh, spec: tuple[Entry, ...]) -> None:
    """Lay the contents of a device tensor out on a mesh, now and whenever they are written.

    Raises:
        ValueError, TypeError: the spec does not fit; nothing is recorded.
        LazyTPUError: the tensor is a view that cannot be split apart from the rest of its storage.
    """
    wanted = sharding(mesh, spec, tensor.shape)
    with lock:
        storage, layout = resolve(cell_of(tensor))
        if storage.sharding is not None and storage.sharding.own:
            raise LazyTPUError("a tensor that is another one on each device has no sharding", at=str(site.line_here()))
        if wanted.is_open:
            if not is_result(tensor):
                raise ValueError(
                    f"only where a result is computed can XLA choose how it lies (...), not for {layout.describe()}"
                )
            _constrain(storage, layout, wanted)
        elif layout is storage.layout:
            _mark(storage, wanted)
        elif (order := permutation(storage.layout, layout)) is not None:
            names = [wanted.spec[order.index(d)] for d in range(len(order))]
            _mark(storage, interned(wanted.mesh, tuple(names)))
        elif is_result(tensor) and not layout.overlapping:
            _constrain(storage, layout, wanted)
        else:
            raise LazyTPUError(
                "a view that is only a part of its storage, or has other dimensions, cannot have a sharding of its own",
                at=str(site.line_here()),
                given=f"{layout.describe()} of a storage {storage.layout.describe()}",
                fix="mark the tensor it is a view of, or a clone() of it",
            )
    if tensor.requires_grad and tensor.is_leaf:
        shardings_kept.share_with_gradient(tensor)
    elif tensor.requires_grad and torch.is_grad_enabled():
        tensor.register_hook(lambda grad: laid_out(grad, mesh, spec))


def laid_out(tensor: torch.Tensor, mesh: Mesh, spec: tuple[Entry, ...]) -> torch.Tensor:
    """Return a new tensor with the contents of one, laid out on a mesh; torch's tracers see an op."""
    found: torch.Tensor = shard_op(tensor, str(sharding(mesh, spec, tensor.shape)))
    return found


def _shard(tensor: torch.Tensor, name: str) -> torch.Tensor:
    wanted, cell = named_sharding(name, tensor.dim()), cell_of(tensor)
    with lock:
        transaction = Transaction()
        while transaction.open():
            on_mesh(wanted.mesh)
            value = record(_SHARD, [cell, name]).value
            made = transaction.write_new([value])
        made[value].sharding = None if wanted.is_open else wanted
        return make(made[value])


library.impl("shard", _shard, "PrivateUse1")


def of_examples(tensor: torch.Tensor) -> tuple[Mesh, tuple[str, ...]] | None:
    """Return the axes over which the first dimension of a tensor is probably split, None where that is not known.

    They are those of the first tensor with as many rows that it is computed from and that was given a sharding.
    """
    size, seen = tuple(tensor.shape[:1]), set[Value]()
    waiting = [load(cell_of(tensor))] if size else []
    while waiting and len(seen) < _MOST_VALUES:
        at = waiting.pop()
        if at in seen or tuple(at.layout.size[:1]) != size:
            continue
        seen.add(at)
        found = at.sharding
        if at.node is not None and at.node.op is _SHARD:
            found = named_sharding(at.node.args[1], len(at.layout.size))
        if found is not None and found.spec[0] not in ((), OPEN):
            return found.mesh, found.spec[0]
        if at.node is not None:
            waiting += [x for x in reversed(list(operands(at.node))) if type(x) is Value]
    return None


def is_result(tensor: torch.Tensor) -> bool:
    """Return whether a device tensor lies in memory that this step computes."""
    storage, _ = resolve(cell_of(tensor))
    return storage.step == trace.step and storage.value.node is not None


def _mark(storage: Storage, wanted: Sharding) -> None:
    if storage.sharding is wanted:
        return
    if isinstance(storage, Unsent) and storage.step != trace.step:
        storage.send(wanted)
    elif storage.buffer is None or storage.step == trace.step:
        _constrain(storage, storage.layout, wanted)
        storage.sharding = wanted
    else:
        buffer = meshes.put(storage.buffer, wanted, storage.layout.size)
        write_buffer(storage, buffer, storage.shared)
        storage.sharding = wanted


def _constrain(storage: Storage, layout: Layout, wanted: Sharding) -> None:
    """Record that what lies at ``layout`` is laid out on a mesh from here on."""
    cell = cell_at(storage, layout)
    transaction = Transaction([cell])
    while transaction.open():
        on_mesh(wanted.mesh)
        value = load(cell)
        node = record(_SHARD, [value, str(wanted)], layouts=(layout_of(value.layout),))
        transaction.write(cell, node.value)


def clear(tensor: torch.Tensor) -> None:
    """Bring the contents of a device tensor to one device."""
    with lock:
        storage, _ = resolve(cell_of(tensor))
        if storage.sharding is None or storage.sharding.own:
            return
        if storage.step != trace.step and storage.buffer is not None:
            write_buffer(storage, meshes.put(storage.buffer, None, storage.layout.size), storage.shared)
            storage.sharding = None
        else:
            _constrain(storage, storage.layout, interned(storage.sharding.mesh, ((),) * len(storage.layout.size)))
            storage.sharding = None


def sharding_of(tensor: torch.Tensor) -> Sharding | None:
    """Return how a device tensor lies; None for a view whose dimensions, but for those of one element, are others."""
    storage, layout = resolve(cell_of(tensor))
    found = None if storage.sharding is None or storage.sharding.own else storage.sharding
    if found is None or layout is storage.layout:
        return found
    dims = shardings_kept.dimensions(storage.layout, layout)
    if dims is None or any(axes and d not in dims for d, axes in enumerate(found.spec)):
        return None
    return interned(found.mesh, tuple([() if d is None else found.spec[d] for d in dims]))


def permutation(root: Layout, layout: Layout) -> list[int] | None:
    """Return which dimension of a storage each one of a view of all of it is; None where they are not the same."""
    if len(layout.size) != len(root.size):
        return None
    found = shardings_kept.dimensions(root, layout) or ()
    left = [d for d in range(len(root.size)) if d not in found]  # of one element, as those that are None
    order = [left.pop(0) if d is None else d for d in found]
    return order if len(order) == len(root.size) else None
