"""Collectives: of the processes of a script, or of what devices have between calls of manual sharding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import torch

from lazytpu.compat.torch_xla.core import world
from lazytpu.ir.tree import trace
from lazytpu.spmd.parts import Exchange, Gather, Permute, Reduce, Scatter
from lazytpu.tracing.parts import is_part
from lazytpu.tracing.record import is_device_tensor

REDUCE_SUM, REDUCE_MUL, REDUCE_AND = "sum", "mul", "and"
REDUCE_OR, REDUCE_MIN, REDUCE_MAX = "or", "min", "max"
_REDUCTIONS = {REDUCE_SUM, REDUCE_MUL, REDUCE_AND, REDUCE_OR, REDUCE_MIN, REDUCE_MAX}
Groups: TypeAlias = Sequence[Sequence[int]] | None
Tensors = TypeVar("Tensors", torch.Tensor, list[torch.Tensor])
T = TypeVar("T")
R = TypeVar("R")


def _check(groups: Groups, reduce_type: str = REDUCE_SUM) -> None:
    """Raise ValueError for a group that needs another process than this, the only one, or an unknown reduction."""
    if reduce_type not in _REDUCTIONS:
        raise ValueError(f"reduce_type is one of {', '.join(sorted(_REDUCTIONS))}, not {reduce_type!r}")
    if groups and any(list(group) != [0] for group in groups):
        raise ValueError(f"groups={groups}: this process, 0, is the only one")


def _over(value: torch.Tensor | Sequence[torch.Tensor], groups: Groups) -> str:
    """Return which devices exchange their parts, as `lazytpu.spmd.parts` names them; empty for whole tensors.

    Raises:
        ValueError: a device is in no group, or in two.
    """
    first = value if isinstance(value, torch.Tensor) else next(iter(value), None)
    if trace.mesh is None or first is None or not (is_device_tensor(first) and is_part(first)):
        return ""
    count = len(trace.mesh.devices)
    found = [list(group) for group in groups] if groups else [list(range(count))]
    if sorted(i for group in found for i in group) != list(range(count)) or len({*map(len, found)}) != 1:
        raise ValueError(f"groups={groups}: each of {count} devices is in one group, and groups are of one size")
    return "|".join(",".join(map(str, group)) for group in found)


def _check_count(name: str, count: int, over: str) -> None:
    devices = len(over.partition("|")[0].split(","))
    if count != devices:
        raise ValueError(f"{name}={count}: a group has {devices} devices")


def _of_parts(function: Callable[..., torch.Tensor], value: Tensors, *arguments: object) -> Tensors:
    """Return what a collective gives for a part, or for each of a list of them."""
    if isinstance(value, torch.Tensor):
        return function(value, *arguments)
    return [function(one, *arguments) for one in value]


def _into(output: Tensors | None, value: Tensors) -> Tensors:
    """Return the value, or copy it into ``output`` and return that."""
    if output is None:
        return value
    for into, one in zip(_as_list(output), _as_list(value), strict=True):
        into.copy_(one)
    return output


def _as_list(value: torch.Tensor | list[torch.Tensor]) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else list(value)


def _scaled(value: Tensors, scale: float) -> Tensors:
    if isinstance(value, torch.Tensor):
        return value.clone() if scale == 1.0 else value * scale
    return [_scaled(tensor, scale) for tensor in value]


def all_reduce(
    reduce_type: str, inputs: Tensors, scale: float = 1.0, groups: Groups = None, pin_layout: bool = True
) -> Tensors:
    """Return the inputs times ``scale``, summed over devices: a new tensor for a tensor, in place for a list."""
    if over := _over(inputs, groups):
        if reduce_type not in (REDUCE_SUM, REDUCE_MIN, REDUCE_MAX):
            raise NotImplementedError(f"all_reduce of parts by {reduce_type!r}; sum, min and max are")
        found = _scaled(_of_parts(Reduce.of, inputs, reduce_type, over), scale)
        return found if isinstance(inputs, torch.Tensor) else _into(inputs, found)
    if world.size() > 1:
        _check(None, reduce_type)
        found = _scaled(_of_parts(world.reduced, inputs, reduce_type, groups), scale)
        return found if isinstance(inputs, torch.Tensor) else _into(inputs, found)
    _check(groups, reduce_type)
    if isinstance(inputs, torch.Tensor):
        return _scaled(inputs, scale)
    if scale != 1.0:
        for tensor in inputs:
            tensor.mul_(scale)
    return inputs


def all_gather(
    value: Tensors,
    dim: int = 0,
    groups: Groups = None,
    output: Tensors | None = None,
    pin_layout: bool = True,
    channel_id: int | None = None,
    use_global_device_ids: bool | None = None,
) -> Tensors:
    """Return the values of all processes, or the parts of devices, side by side."""
    if over := _over(value, groups):
        return _into(output, _of_parts(Gather.of, value, dim, over))
    if world.size() > 1:
        return _into(output, _of_parts(world.gathered, value, dim, groups))
    _check(groups)
    return _into(output, _scaled(value, 1.0))


def all_gather_bucketized(
    input_list: Sequence[torch.Tensor],
    dim: int = 0,
    groups: Groups = None,
    output: list[torch.Tensor] | None = None,
    **options: object,
) -> list[torch.Tensor]:
    """As `all_gather` for each tensor."""
    return all_gather(list(input_list), dim, groups, output)


def all_to_all(
    value: torch.Tensor,
    split_dimension: int,
    concat_dimension: int,
    split_count: int,
    groups: Groups = None,
    pin_layout: bool = True,
) -> torch.Tensor:
    """Return the value, split into one piece and concatenated again; of parts, those that other devices send.

    Raises:
        ValueError: ``split_count`` is not the number of devices of a group.
    """
    if over := _over(value, groups):
        _check_count("split_count", split_count, over)
        return _of_parts(Exchange.of, value, split_dimension, concat_dimension, over)
    if world.size() > 1:
        return world.exchanged(value, split_dimension, concat_dimension, groups)
    _check(groups)
    if split_count != 1:
        raise ValueError(f"split_count={split_count}: this process is the only one")
    return value.clone()


def collective_permute(value: torch.Tensor, pairs: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the value where this process sends to itself, else zeros, as a process without a sender receives."""
    if _over(value, None):
        return _of_parts(Permute.of, value, [int(n) for pair in pairs for n in pair])
    if world.size() > 1:
        return world.permuted(value, pairs)
    if any(n for pair in pairs for n in pair):
        raise ValueError(f"pairs={list(pairs)}: this process, 0, is the only one")
    return value.clone() if pairs else torch.zeros_like(value)


def collective_broadcast(
    tensors: Sequence[torch.Tensor], root_ordinal: int = 0, groups: Groups = None, pin_layout: bool = True
) -> None:
    """Overwrite tensors with those of the root."""
    if world.size() > 1:
        world.spread(tensors, root_ordinal, groups)
        return
    _check(groups)
    if root_ordinal:
        raise ValueError(f"root_ordinal={root_ordinal}: this process, 0, is the only one")


def reduce_scatter(
    reduce_type: str,
    input: Tensors,
    scale: float,
    scatter_dim: int,
    shard_count: int,
    groups: Groups = None,
    output: Tensors | None = None,
    pin_layout: bool = True,
    channel_id: int | None = None,
    use_global_device_ids: bool | None = None,
) -> Tensors:
    """Return the input times ``scale``: its only shard; of parts, a share of their sum.

    Raises:
        ValueError: ``shard_count`` is not the number of devices of a group.
    """
    if over := _over(input, groups):
        _check_count("shard_count", shard_count, over)
        if reduce_type != REDUCE_SUM:
            raise NotImplementedError(f"reduce_scatter of parts by {reduce_type!r}; sum is")
        dims = {x.dim() for x in _as_list(input)}
        at = scatter_dim if scatter_dim >= 0 else scatter_dim + dims.pop()
        return _into(output, _scaled(_of_parts(Scatter.of, input, at, over), scale))
    if world.size() > 1:
        _check(None, reduce_type)
        return _into(output, _scaled(_of_parts(world.scattered, input, reduce_type, scatter_dim, groups), scale))
    _check(groups, reduce_type)
    if shard_count != 1:
        raise ValueError(f"shard_count={shard_count}: this process is the only one")
    return _into(output, _scaled(input, scale))


def reduce_scatter_bucketized(
    reduce_type: str,
    input_list: list[torch.Tensor],
    scale: float = 1.0,
    scatter_dim: int = 0,
    shard_count: int = 1,
    groups: Groups = None,
    output: list[torch.Tensor] | None = None,
    **options: object,
) -> list[torch.Tensor]:
    """As `reduce_scatter` for each tensor."""
    return reduce_scatter(reduce_type, input_list, scale, scatter_dim, shard_count, groups, output)


class CoalescingBuckets:
    """Hands tensors to ``func`` in one bucket."""

    def __init__(
        self,
        func: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor] | None], object],
        input_list: Sequence[torch.Tensor],
        output_list: Sequence[torch.Tensor] | None = None,
        bucket_cap_mb: int = 160,
    ) -> None:
        self._func, self._inputs, self._outputs = func, input_list, output_list

    def __call__(self) -> object:
        return self._func(self._inputs, self._outputs)


def reduce_gradients(
    optimizer: torch.optim.Optimizer, groups: Groups = None, pin_layout: bool = True, reduce: str = "mean"
) -> None:
    """Replace gradients by their mean, or sum, over the processes of a group."""
    if world.size() > 1:
        found = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        count = len(groups[0]) if groups else world.size()
        all_reduce(REDUCE_SUM, found, 1.0 / count if reduce == "mean" else 1.0, groups)
        return
    _check(groups)


def all_reduce_bucketized_gradients(
    gradients: Sequence[torch.Tensor], scale: float, groups: Groups, pin_layout: bool, bucket_cap_mb: int = 0
) -> None:
    """Scale the gradients."""
    all_reduce(REDUCE_SUM, list(gradients), scale, groups)


def broadcast_master_param(model: torch.nn.Module) -> None:
    """Give all processes the parameters and buffers of the first one."""
    if world.size() > 1:
        world.spread([*model.parameters(), *model.buffers()], 0, None)


def rendezvous(tag: str, payload: bytes = b"", replicas: Sequence[int] | None = None) -> list[bytes]:
    """Return the payloads of all processes, which meet at ``tag``."""
    return world.of_all(payload) if world.size() > 1 else [payload]


def xla_rendezvous(payload: bytes = b"", ordinals: Sequence[int] | None = None, tag: str | None = None) -> list[bytes]:
    """As `rendezvous`."""
    return rendezvous(tag or "", payload)


def mesh_reduce(tag: str, data: T, reduce_fn: Callable[[list[T]], R]) -> R:
    """Return ``reduce_fn`` of the list of every process's data."""
    return reduce_fn(world.of_all(data) if world.size() > 1 else [data])


def do_on_ordinals(target: Callable[..., object], data: Sequence[object] = (), ordinals: Sequence[int] = (0,)) -> None:
    """Call ``target(*data)`` in the processes of ``ordinals``."""
    if world.rank() in ordinals:
        target(*data)
    if world.size() > 1:
        world.meet()
