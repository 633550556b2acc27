"""What torch hands to a collective: tensors, options, reductions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
import torch.distributed as dist

from lazytpu.dispatch.exchange import Reduction
from lazytpu.errors import LazyTPUError
from lazytpu.ir.op_schema import Arg
from lazytpu.tensors.tensor import LazyTensor

Tensor = torch.Tensor
Options: TypeAlias = Arg
"""torch's options of a collective, or None, or in their place a ``ReduceOp`` or the rank of a root."""
Tensors: TypeAlias = Arg
"""One tensor, or a list of them; or such a list for each of several, as torch's older forms have it."""
_REDUCTIONS = {
    getattr(dist.ReduceOp, name): name.lower()
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
}


def listed(tensors: Tensors) -> list[Tensor]:
    """Return one tensor, or several, as a list."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def passed(opts: Options) -> list[Options]:
    """Return the options to pass on: none, or one."""
    return [] if opts is None else [opts]


def on_device(tensors: Sequence[Tensor]) -> bool:
    """Return whether tensors are on the device and not on the CPU.

    Raises:
        RuntimeError: some are, and some are not.
    """
    found = {x.device.type for x in tensors}
    if len(found) > 1:
        raise RuntimeError(f"a collective of tensors on {' and '.join(sorted(found))}")
    return found == {LazyTensor.device_type}


def read(x: Tensor) -> Tensor:
    """Return what a collective takes of a tensor: its numbers, without its gradient."""
    return x.detach()


def padded(x: Tensor, most: int) -> Tensor:
    """Return the numbers of a tensor in a row, with zeros behind them, as many as the largest tensor has."""
    row = read(x).reshape(-1)
    return row if len(row) == most else torch.nn.functional.pad(row, [0, most - len(row)])


def write(target: Tensor, found: Tensor) -> None:
    """Copy, and leave the version of the target as it was: torch's collectives do."""
    target.data.copy_(found)


def write_parts(targets: Sequence[Tensor], found: Tensor) -> None:
    """Write each row to a tensor of its own."""
    for x, part in zip(targets, found.unbind(0), strict=True):
        write(x, part.reshape(x.shape))


def reduction_of(opts: Options) -> Reduction:
    """Return the reduction that options name; sums where they name none."""
    op: Arg = opts if isinstance(opts, (dist.ReduceOp, dist.ReduceOp.RedOpType)) else getattr(opts, "reduceOp", None)
    if op is None:
        return Reduction("sum")
    for known, name in _REDUCTIONS.items():
        if op == known:
            return Reduction(name)
    if op == dist.ReduceOp.PREMUL_SUM:
        return Reduction("sum", float(op.__getstate__()[1]))
    raise LazyTPUError(f"reductions of {op} are not supported")
