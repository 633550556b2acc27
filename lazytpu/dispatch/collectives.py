"""Functional collectives (``torch.ops._c10d_functional``) in a world of one process: copies of what they are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lazytpu.errors import LazyTPUError

Tensor = torch.Tensor
_libraries: list[torch.library.Library] = []
_KERNELS: dict[str, Callable[..., object]] = {}


def _kernel(*names: str) -> Callable[[Callable[..., object]], Callable[..., object]]:
    def register(function: Callable[..., object]) -> Callable[..., Any]:
        _KERNELS.update(dict.fromkeys(names, function))
        return function

    return register


def _check_alone(group: object, group_size: int = 1) -> None:
    """Raise where there is somebody else in the group."""
    size = group_size
    if dist.is_available() and dist.is_initialized():
        if isinstance(group, str):
            from torch.distributed import distributed_c10d

            group = distributed_c10d._resolve_process_group(group)  # type: ignore[attr-defined, arg-type]
        size = max(size, group.size() if isinstance(group, dist.ProcessGroup) else dist.get_world_size())
    if size != 1:
        raise LazyTPUError(
            f"a collective of {size} processes: tensors of the device can be exchanged in a world of one only",
            fix="exchange CPU tensors, or use one process for all devices",
        )


@_kernel("all_reduce", "broadcast")
def copied(x: Tensor, reduce_op_or_source: object, group: object) -> Tensor:
    _check_alone(group)
    return x.clone()


@_kernel("all_reduce_", "broadcast_")
def unchanged(x: Tensor, reduce_op_or_source: object, group: object) -> Tensor:
    _check_alone(group)
    return x


@_kernel("all_reduce_coalesced")
def all_reduce_coalesced(xs: Sequence[Tensor], reduce_op: str, group: object) -> list[Tensor]:
    _check_alone(group)
    return [x.clone() for x in xs]


@_kernel("all_reduce_coalesced_")
def all_reduce_coalesced_(xs: list[Tensor], reduce_op: str, group: object) -> list[Tensor]:
    _check_alone(group)
    return xs


@_kernel("all_gather_into_tensor")
def all_gather(x: Tensor, group_size: int, group: object) -> Tensor:
    _check_alone(group, group_size)
    return _rows(x)


@_kernel("all_gather_into_tensor_coalesced")
def all_gather_coalesced(xs: Sequence[Tensor], group_size: int, group: object) -> list[Tensor]:
    _check_alone(group, group_size)
    return [_rows(x) for x in xs]


@_kernel("all_gather_into_tensor_out")
def all_gather_out(x: Tensor, group_size: int, group: object, *, out: Tensor) -> Tensor:
    _check_alone(group, group_size)
    return out.copy_(_rows(x))


@_kernel("reduce_scatter_tensor")
def reduce_scatter(x: Tensor, reduce_op: str, group_size: int, group: object) -> Tensor:
    _check_alone(group, group_size)
    return _rows(x)


@_kernel("reduce_scatter_tensor_coalesced")
def reduce_scatter_coalesced(xs: Sequence[Tensor], reduce_op: str, group_size: int, group: object) -> list[Tensor]:
    _check_alone(group, group_size)
    return [_rows(x) for x in xs]


@_kernel("reduce_scatter_tensor_out")
def reduce_scatter_out(x: Tensor, reduce_op: str, group_size: int, group: object, *, out: Tensor) -> Tensor:
    _check_alone(group, group_size)
    return out.copy_(_rows(x))


def _rows(x: Tensor) -> Tensor:
    """Return the rows of all processes, or the part of one of them: a contiguous copy of at least one dimension."""
    return x.clone(memory_format=torch.contiguous_format).reshape(x.shape or (1,))


@_kernel("all_to_all_single")
def all_to_all(x: Tensor, output_split_sizes: Sequence[int], input_split_sizes: Sequence[int], group: object) -> Tensor:
    _check_alone(group)
    rows = x.shape[0] if x.dim() else 1
    if sum(input_split_sizes) != rows or list(output_split_sizes) != list(input_split_sizes):
        raise ValueError(
            f"all_to_all_single: {rows} rows in a world of one, "
            f"given splits {list(input_split_sizes)} -> {list(output_split_sizes)}"
        )
    return x.clone(memory_format=torch.contiguous_format)


@_kernel("wait_tensor")
def wait_tensor(x: Tensor) -> Tensor:
    return x


def register() -> None:
    """Register the kernels; those with gradients (``_c10d_functional_autograd``) come to them as well."""
    if not dist.is_available():
        return
    library = torch.library.Library("_c10d_functional", "IMPL")
    _libraries.append(library)
    for name, kernel in _KERNELS.items():
        library.impl(name, kernel, "PrivateUse1")
