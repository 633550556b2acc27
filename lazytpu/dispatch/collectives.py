"""Functional collectives (``torch.ops._c10d_functional``): recorded for the groups of our backend, copies in a world of
one process, whatever its backend.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.utils.weak import WeakTensorKeyDictionary

from lazytpu.dispatch import exchange
from lazytpu.dispatch.exchange import Group, Reduction
from lazytpu.errors import LazyTPUError
from lazytpu.ir.op_schema import Arg

Tensor = torch.Tensor
_libraries: list[torch.library.Library] = []
_KERNELS: dict[str, Callable[..., object]] = {}
_Function = TypeVar("_Function", bound=Callable[..., object])
groups: dict[str, Group] = {}
"""The groups of our backend, by the name that torch gives them in this process."""

_group_named: Callable[[str], Arg] = vars(c10d)["_resolve_process_group"]
_awaited: MutableMapping[Tensor, dist.Work] = WeakTensorKeyDictionary()  # what goes through the host
_ALONE = exchange.group_of((0,), 0, 1)


def _kernel(*names: str) -> Callable[[_Function], _Function]:
    def register(function: _Function) -> _Function:
        _KERNELS.update(dict.fromkeys(names, function))
        return function

    return register


def _found(group: object, group_size: int = 1) -> Group:
    """Return the members of one of torch's groups.

    Raises:
        LazyTPUError: another backend than ours connects several processes.
    """
    name = group if isinstance(group, str) else getattr(group, "group_name", "")
    known = groups.get(name)
    if known is not None:
        return known
    size = group_size
    if dist.is_available() and dist.is_initialized():
        if isinstance(group, str):
            from torch.distributed import distributed_c10d

            group = distributed_c10d._resolve_process_group(group)  # type: ignore[attr-defined, arg-type]
        size = max(size, group.size() if isinstance(group, dist.ProcessGroup) else dist.get_world_size())
    if size != 1:
        raise LazyTPUError(
            f"a collective of {size} processes on tensors of the device, in a group of another backend",
            fix='init_process_group("lazytpu"), or no backend at all; or exchange CPU tensors',
        )
    return _ALONE


@_kernel("all_reduce")
def all_reduce(x: Tensor, reduce_op: str, group: object) -> Tensor:
    return exchange.all_reduce(x, Reduction(reduce_op.lower()), _found(group))


@_kernel("all_reduce_")
def all_reduce_(x: Tensor, reduce_op: str, group: object) -> Tensor:
    found = _found(group)
    return x if found.size == 1 else x.copy_(exchange.all_reduce(x, Reduction(reduce_op.lower()), found))


@_kernel("all_reduce_coalesced")
def all_reduce_coalesced(xs: Sequence[Tensor], reduce_op: str, group: object) -> list[Tensor]:
    return [all_reduce(x, reduce_op, group) for x in xs]


@_kernel("all_reduce_coalesced_")
def all_reduce_coalesced_(xs: list[Tensor], reduce_op: str, group: object) -> list[Tensor]:
    return [all_reduce_(x, reduce_op, group) for x in xs]


@_kernel("broadcast")
def broadcast(x: Tensor, source: int, group: object) -> Tensor:
    return exchange.broadcast(x, source, _found(group))


@_kernel("broadcast_")
def broadcast_(x: Tensor, source: int, group: object) -> Tensor:
    found = _found(group)
    return x if found.size == 1 else x.copy_(exchange.broadcast(x, source, found))


@_kernel("all_gather_into_tensor")
def all_gather(x: Tensor, group_size: int, group: object) -> Tensor:
    return exchange.all_gather(x, _found(group, group_size))


@_kernel("all_gather_into_tensor_coalesced")
def all_gather_coalesced(xs: Sequence[Tensor], group_size: int, group: object) -> list[Tensor]:
    return [all_gather(x, group_size, group) for x in xs]


@_kernel("all_gather_into_tensor_out")
def all_gather_out(x: Tensor, group_size: int, group: object, *, out: Tensor) -> Tensor:
    return out.copy_(all_gather(x, group_size, group))


@_kernel("reduce_scatter_tensor")
def reduce_scatter(x: Tensor, reduce_op: str, group_size: int, group: object) -> Tensor:
    return exchange.reduce_scatter(x, Reduction(reduce_op.lower()), _found(group, group_size))


@_kernel("reduce_scatter_tensor_coalesced")
def reduce_scatter_coalesced(xs: Sequence[Tensor], reduce_op: str, group_size: int, group: object) -> list[Tensor]:
    return [reduce_scatter(x, reduce_op, group_size, group) for x in xs]


@_kernel("reduce_scatter_tensor_out")
def reduce_scatter_out(x: Tensor, reduce_op: str, group_size: int, group: object, *, out: Tensor) -> Tensor:
    return out.copy_(reduce_scatter(x, reduce_op, group_size, group))


@_kernel("all_to_all_single")
def all_to_all(x: Tensor, output_split_sizes: Sequence[int], input_split_sizes: Sequence[int], group: object) -> Tensor:
    found = _found(group)
    rows = x.shape[0] if x.dim() else 1
    alone = found.size == 1 and list(output_split_sizes) != list(input_split_sizes)
    if alone or len(input_split_sizes) != found.size or sum(input_split_sizes) != rows:
        what = "a world of one" if found.size == 1 else f"a group of {found.size}"
        raise ValueError(
            f"all_to_all_single: {rows} rows in {what}, "
            f"given splits {list(input_split_sizes)} -> {list(output_split_sizes)}"
        )
    return exchange.all_to_all_in_parts(x, output_split_sizes, input_split_sizes, found)


@_kernel("isend")
def isend(x: Tensor, peer: int, tag: int, group: str) -> Tensor:
    _awaited[x] = _group_named(group).send([x], peer, tag)
    return x


@_kernel("irecv")
def irecv(x: Tensor, peer: int, tag: int, group: str) -> Tensor:
    _awaited[x] = _group_named(group).recv([x], peer, tag)
    return x


@_kernel("batch_p2p_ops")
def batch_p2p_ops(
    ops: Sequence[str], peers: Sequence[int], tags: Sequence[int], xs: Sequence[Tensor], group: str
) -> list[Tensor]:
    call = {"isend": isend, "irecv": irecv}
    return [call[op](x, peer, tag, group) for op, peer, tag, x in zip(ops, peers, tags, xs, strict=True)]


@_kernel("wait_tensor")
def wait_tensor(x: Tensor) -> Tensor:
    if _awaited and (work := _awaited.pop(x, None)) is not None:
        work.wait()
    return x


def register() -> None:
    """Register the kernels; those with gradients (``_c10d_functional_autograd``) come to them as well."""
    if not dist.is_available():
        return
    library = torch.library.Library("_c10d_functional", "IMPL")
    _libraries.append(library)
    for name, kernel in _KERNELS.items():
        if hasattr(torch.ops._c10d_functional, name):  # an older torch has not all
            library.impl(name, kernel, "PrivateUse1")
