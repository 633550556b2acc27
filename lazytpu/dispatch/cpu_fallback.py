"""Ops that run on the host: those whose result's shape depends on data, and fallbacks.

Data-dependent shapes are cuts (the graph so far runs, the op runs on the values, the result comes back);
a fallback is an op without lowering, which is counted, and warned of once with its line.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

from lazytpu.config import config
from lazytpu.diagnosis import events
from lazytpu.dispatch.general import call_meta, functional, on_other_device, unsupported
from lazytpu.dispatch.handwritten import from_host, kernel
from lazytpu.ir.op_schema import OpOverload, display_name
from lazytpu.location import site
from lazytpu.observe import metrics
from lazytpu.runtime import placement
from lazytpu.tensors.storage import storage_of
from lazytpu.tracing.reading import read
from lazytpu.tracing.record import cell_of, is_device_tensor, lock

# Overloads whose result's shape depends on the values.
DATA_DEPENDENT = {
    "nonzero",
    "nonzero_static",
    "masked_select",
    "_unique",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "unique_dim_consecutive",
    "repeat_interleave.Tensor",
    "bincount",
    "_linalg_check_errors",
    "is_nonzero",
    "_nested_tensor_from_mask",
    "argwhere",
    "_validate_compressed_sparse_indices",
}

_LSTSQ = torch.ops.aten.linalg_lstsq.default
_lstsq = functional(_LSTSQ)
_INDEX = torch.ops.aten.index.Tensor
_gather = functional(_INDEX)
_warned: set[str] = set()


class FallbackWarning(UserWarning):
    """An op ran on the CPU because it has no lowering."""


def data_dependent(overload: OpOverload) -> Callable[..., object]:
    """Return the kernel of an op that needs values to know its shape: a cut, not a fallback."""
    name = display_name(overload)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if on_other_device(args, kwargs):
            return call_meta(overload, args, kwargs)
        return run_on_host(overload, args, kwargs, name)

    return kernel


@kernel("index.Tensor")
def index(tensor: torch.Tensor, indices: Any) -> Any:
    """``x[i, j]`` is recorded; a mask among the indices decides the shape, so ``x[mask]`` is a cut."""
    masks = (torch.bool, torch.uint8)
    if any(i is not None and i.dtype in masks and i.device.type != "meta" for i in indices):
        return run_on_host(_INDEX, (tensor, indices), {}, "index with a mask")
    return _gather(tensor, indices)


@kernel("cholesky")
def cholesky(tensor: torch.Tensor, upper: bool = False) -> object:
    """Do what ``linalg.cholesky`` does, under its older name: the result is checked as well, and so read."""
    if on_other_device((tensor,), {}):
        return call_meta(torch.ops.aten.cholesky.default, (tensor, upper), {})
    if not tensor.numel():
        return torch.empty_like(tensor)
    factor, info = torch.ops.aten.linalg_cholesky_ex.default(tensor, upper=upper)
    torch.ops.aten._linalg_check_errors.default(info, "cholesky", is_matrix=tensor.dim() == 2)
    return factor


@kernel("linalg_lstsq")
def lstsq(a: torch.Tensor, b: torch.Tensor, rcond: float | None = None, *, driver: str | None = None) -> object:
    """Is recorded, except where only the rank of the matrix says whether there are residuals."""
    if driver in ("gelss", "gelsd") and a.device.type != "meta" and a.dim() > 1 and a.shape[-2] > a.shape[-1]:
        return run_on_host(_LSTSQ, (a, b, rcond), {"driver": driver}, f"the rank for linalg.lstsq with {driver}")
    return _lstsq(a, b, rcond, driver=driver)


def warned_at(text: str, category: type[Warning]) -> None:
    """Warn at the user's line, however many calls of torch lie between."""
    where = site.here()
    text = f"{text}, at {where.describe()}"
    if where.file:
        warnings.warn_explicit(text, category, where.file, where.line)
    else:
        warnings.warn(text, category, stacklevel=3)


def fallback(overload: OpOverload) -> Callable[..., object]:
    """Return the kernel of an op without lowering, which runs on the CPU, or raises when so configured."""
    name = display_name(overload)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if on_other_device(args, kwargs):
            return call_meta(overload, args, kwargs)
        if config.fallback == "error":
            raise unsupported(overload, args, kwargs)
        metrics.count_fallback(name)
        if name not in _warned:
            _warned.add(name)
            warned_at(f"{name} has no lowering and runs on the CPU", FallbackWarning)
        line, start = site.line_of_read(), time.perf_counter()
        try:
            return run_on_host(overload, args, kwargs, f"fallback of {name}")
        finally:
            events.fell_back(name, str(line), time.perf_counter() - start)

    return kernel


def run_on_host(overload: OpOverload, args: Any, kwargs: Any, reason: str) -> object:
    """Run an op on copies of its arguments on the CPU, and bring the results, and what it wrote, back."""
    placement.note_on_host(overload)
    copies: dict[int, torch.Tensor] = {}
    host_args, host_kwargs = (
        _down(tuple(args), copies, reason),
        {k: _down(v, copies, reason) for k, v in kwargs.items()},
    )
    with torch.no_grad(), lock:
        result = overload(*host_args, **host_kwargs)
        written = _written(overload, args, kwargs)
        for ours in written:
            ours.copy_(copies[id(ours)])
    return _up(result, {id(copies[id(ours)]): ours for ours in written})


def _down(x: Any, copies: dict[int, torch.Tensor], reason: str) -> Any:
    """Return ``x`` with device tensors replaced by copies on the CPU, one for each tensor."""
    if is_device_tensor(x):
        if id(x) not in copies:
            copies[id(x)] = read(x, reason)
        return copies[id(x)]
    if isinstance(x, (list, tuple)):
        return type(x)([_down(e, copies, reason) for e in x])
    return torch.device("cpu") if isinstance(x, torch.device) else x


def _up(x: object, owners: dict[int, torch.Tensor]) -> object:
    """Return ``x`` with CPU tensors replaced by device tensors: those that own them, or new ones."""
    if isinstance(x, torch.Tensor):
        if id(x) in owners:
            return owners[id(x)]
        made = from_host(x, copied=False)
        storage_of(cell_of(made)).computed_on_host = True
        return made
    return type(x)([_up(e, owners) for e in x]) if isinstance(x, (list, tuple)) else x


def _written(overload: OpOverload, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the device tensors among the arguments that the op writes to."""
    found: list[torch.Tensor] = []
    for position, argument in enumerate(overload._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = kwargs.get(argument.name) if position >= len(args) else args[position]
            found += [t for t in (given if isinstance(given, (list, tuple)) else [given]) if is_device_tensor(t)]
    return found
