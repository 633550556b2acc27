"""Where each value of a sparse result comes from.

The CPU's own op runs on the indices alone, with whole numbers as values that say which value each one is: the result's
indices, their order, whether it is coalesced and what is refused are the CPU's, and the numbers in it say what to
gather on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lazytpu.dispatch.sparse.parts import (
    COO,
    add_up,
    coo,
    flat_indices,
    host_indices,
    indices_of,
    to_device,
    values_of,
)
from lazytpu.ir.op_schema import OpOverload
from lazytpu.tracing.record import is_device_tensor


def numbered(x: Tensor, reason: str, first: int = 1) -> Tensor:
    """Return a COO tensor as one on the CPU whose values are ``first``, ``first + 1`` and so on."""
    values = values_of(x)
    numbers = torch.arange(first, first + values.numel(), device="cpu").view(values.shape)
    return on_cpu(x, numbers, reason)


def on_cpu(x: Tensor, values: Tensor, reason: str) -> Tensor:
    """Return a COO tensor on the CPU with the indices of ``x`` and the given values."""
    made = torch.sparse_coo_tensor(host_indices(x, reason), values, x.shape, check_invariants=False)
    return made._coalesced_(x.is_coalesced())


def moving(overload: OpOverload) -> Callable[..., Tensor]:
    """Return the kernel of an op of one COO tensor, or a list of them, that moves values and computes none."""
    reason = f"indices for {overload._schema.name.removeprefix('aten::')}"

    def kernel(given: Tensor | Sequence[Tensor], *args: object, **kwargs: object) -> Tensor:
        inputs = [given] if isinstance(given, Tensor) else list(given)
        dtype = inputs[0].dtype
        for other in inputs[1:]:
            dtype = torch.promote_types(dtype, other.dtype)
        first, hosts = 1, []
        for x in inputs:
            hosts.append(numbered(x, reason, first) if x.layout is COO else x)
            first += values_of(x).numel() if x.layout is COO else 0
        host_args = [a.cpu() if is_device_tensor(a) else a for a in args]
        made: Tensor = overload(hosts[0] if isinstance(given, Tensor) else hosts, *host_args, **kwargs)
        values = [values_of(x).to(dtype).reshape(-1) for x in inputs]
        source = values[0] if len(values) == 1 else torch.cat(values)
        if made.layout is not COO:  # all of the dims with indices were taken
            return gather(source, made)
        return coo(to_device(made._indices()), gather(source, made._values()), made.shape, made.is_coalesced())

    return kernel


def gather(source: Tensor, numbers: Tensor) -> Tensor:
    """Return the values that the CPU numbered from one; where it has a zero there is none, which is a zero."""
    numbers = numbers.contiguous()
    if not numbers.numel():
        return source.new_zeros(tuple(numbers.shape))
    found = source.index_select(0, to_device((numbers - 1).clamp(min=0)).view(-1)).view(numbers.shape)
    if bool((numbers == 0).any()):
        found = torch.where(to_device(numbers > 0), found, torch.zeros((), dtype=found.dtype, device=found.device))
    return found


def coalesced(x: Tensor) -> Tensor:
    """Return a COO tensor without two values at one place, the places in order."""
    if x.is_coalesced():
        return x
    values = values_of(x)
    if values.shape[0] < 2:
        return coo(indices_of(x).clone(), values.clone(), x.shape, True)
    places, inverse = unique_columns(host_indices(x, "indices to coalesce"), x.shape)
    return coo(to_device(places), added_up(inverse, values, places.shape[1]), x.shape, True)


def unique_columns(indices: Tensor, size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the columns of indices [dims, n] on the CPU without repetition, in order, and which each of them is."""
    flat = flat_indices(indices, size[: indices.shape[0]])
    found, inverse = torch.unique(flat, return_inverse=True)
    first = torch.empty(found.shape[0], dtype=torch.int64, device="cpu")
    first[inverse] = torch.arange(flat.shape[0], device="cpu")
    return indices[:, first].contiguous(), inverse


def added_up(inverse: Tensor, values: Tensor, count: int) -> Tensor:
    """Return the values by segment, which the CPU found; only gathered where no two are in one."""
    if count == inverse.shape[0]:
        order = torch.empty_like(inverse)
        order[inverse] = torch.arange(count, device="cpu")
        return values.index_select(0, to_device(order))
    return add_up(to_device(inverse), values, count)
