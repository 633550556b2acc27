"""Record what each device of a mesh does with its own part of a tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lazytpu.errors import LazyTPUError
from lazytpu.ir.graph import FROM_PARTS, TO_PARTS
from lazytpu.ir.op_schema import op_of
from lazytpu.ir.sharding import Sharding
from lazytpu.ir.tree import Value, operands
from lazytpu.location import site
from lazytpu.lowering.rules import parts
from lazytpu.tensors.storage import resolve
from lazytpu.tensors.tensor import make
from lazytpu.tracing import parts_of_step
from lazytpu.tracing.mesh_of_step import on_mesh
from lazytpu.tracing.record import cell_of, load, lock, record
from lazytpu.tracing.transaction import Transaction

_ops = torch.ops.lazytpu
assert parts.library is not None  # it defines the ops


def is_part(tensor: torch.Tensor) -> bool:
    """Return whether a device tensor is another one on each device of a mesh."""
    waiting, seen = [load(cell_of(tensor))], set[Value]()
    while waiting:
        at = waiting.pop()
        if at.sharding is not None and at.sharding.own:
            return True
        if at in seen or at.node is None or at.node.op.name == FROM_PARTS:
            continue
        if at.node.op.name == TO_PARTS:
            return True
        seen.add(at)
        waiting += [x for x in operands(at.node) if type(x) is Value]
    return False


def to_parts(tensor: torch.Tensor, sharding: Sharding) -> torch.Tensor:
    """Return the part of each device; where sizes do not divide, zeros are at the end.

    Raises:
        LazyTPUError: the tensor is a part already.
    """
    if is_part(tensor):
        raise LazyTPUError(
            "a part of a tensor cannot be split again", at=str(site.line_here()), fix="split the whole over more axes"
        )
    made = _recorded(_ops.to_parts.default, tensor, str(sharding), sharding=sharding)
    parts_of_step.note()
    return made


def from_parts(tensor: torch.Tensor, sharding: Sharding, size: Sequence[int]) -> torch.Tensor:
    """Return the whole tensor of parts; devices that are to have the same part must have computed it alike.

    Raises:
        LazyTPUError: it is no part.
        ValueError: a tensor of that size has other parts.
    """
    if not is_part(tensor):
        raise LazyTPUError("this tensor is not a part that each device has its own of", at=str(site.line_here()))
    wanted = [n // k for n, k in zip(sharding.padded(size), sharding.parts, strict=True)]
    if list(tensor.shape) != wanted:
        raise ValueError(
            f"a tensor of shape {list(size)} as {sharding} has parts of shape {wanted}, not {list(tensor.shape)}"
        )
    made = _recorded(_ops.from_parts.default, tensor, str(sharding), list(size), sharding=sharding)
    resolve(cell_of(made))[0].sharding = sharding
    return made


def collective(op: torch._ops.OpOverload, tensor: torch.Tensor, *arguments: object) -> torch.Tensor:
    """Return what an op of `lazytpu.lowering.rules.parts` gives each device.

    Raises:
        LazyTPUError: the tensor is no part.
    """
    if not is_part(tensor):
        raise LazyTPUError(
            "devices exchange parts of tensors, and this tensor is whole on each",
            at=str(site.line_here()),
            fix="call it on what the function of shard_map gets",
        )
    return _recorded(op, tensor, *arguments)


def _recorded(
    op: torch._ops.OpOverload, tensor: torch.Tensor, *arguments: object, sharding: Sharding | None = None
) -> torch.Tensor:
    cell = cell_of(tensor)
    with lock:
        transaction = Transaction()
        while transaction.open():
            if sharding is not None:
                on_mesh(sharding.mesh)
            value = record(op_of(op), [cell, *arguments]).value
            made = transaction.write_new([value])
        return make(made[value])
