"""Collectives among the processes of a world of one: what they give without anybody else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

REDUCE_SUM, REDUCE_MUL, REDUCE_AND = "sum", "mul", "and"
REDUCE_OR, REDUCE_MIN, REDUCE_MAX = "or", "min", "max"
_REDUCTIONS = {REDUCE_SUM, REDUCE_MUL, REDUCE_AND, REDUCE_OR, REDUCE_MIN, REDUCE_MAX}
T = TypeVar("T")


def _check(groups: Sequence[Sequence[int]] | None, reduce_type: str = REDUCE_SUM) -> None:
    """Raises ValueError for a group that needs another process, or an unknown reduction."""
    if reduce_type not in _REDUCTIONS:
        raise ValueError(f"reduce_type is one of {', '.join(sorted(_REDUCTIONS))}, not {reduce_type!r}")
    if groups and any(list(group) != [0] for group in groups):
        raise ValueError(f"groups={groups}: this process, 0, is the only one")


def all_reduce(
    reduce_type: str,
    inputs: Any,
    scale: float = 1.0,
    groups: Sequence[Sequence[int]] | None = None,
    pin_layout: bool = True,
) -> Any:
    """The inputs times ``scale``: a new tensor for a tensor, in place for a list."""
    _check(groups, reduce_type)
    if isinstance(inputs, torch.Tensor):
        return inputs.clone() if scale == 1.0 else inputs * scale
    if scale != 1.0:
        for tensor in inputs:
            tensor.mul_(scale)
    return inputs


def all_gather(
    value: Any,
    dim: int = 0,
    groups: Sequence[Sequence[int]] | None = None,
    output: Any = None,
    pin_layout: bool = True,
    channel_id: int | None = None,
    use_global_device_ids: bool | None = None,
) -> Any:
    """The value of the only process."""
    _check(groups)
    if output is None:
        return value.clone() if isinstance(value, torch.Tensor) else [v.clone() for v in value]
    for into, one in zip(*([output], [value]) if isinstance(value, torch.Tensor) else (output, value), strict=True):
        into.copy_(one)
    return output


def all_gather_bucketized(
    input_list: Sequence[torch.Tensor], dim: int = 0, groups: Any = None, output: Any = None, **options: Any
) -> Any:
    """As `all_gather` for each tensor."""
    return all_gather(list(input_list), dim, groups, output)


def all_to_all(
    value: torch.Tensor,
    split_dimension: int,
    concat_dimension: int,
    split_count: int,
    groups: Sequence[Sequence[int]] | None = None,
    pin_layout: bool = True,
) -> torch.Tensor:
    """The value, split into one piece and put together again.

    Raises:
        ValueError: ``split_count`` is not 1.
    """
    _check(groups)
    if split_count != 1:
        raise ValueError(f"split_count={split_count}: this process is the only one")
    return value.clone()


def collective_permute(value: torch.Tensor, pairs: Sequence[Sequence[int]]) -> torch.Tensor:
    """The value where this process sends to itself, else zeros, which is what nobody's receiver gets."""
    if any(n for pair in pairs for n in pair):
        raise ValueError(f"pairs={list(pairs)}: this process, 0, is the only one")
    return value.clone() if pairs else torch.zeros_like(value)


def collective_broadcast(
    tensors: Sequence[torch.Tensor], root_ordinal: int = 0, groups: Any = None, pin_layout: bool = True
) -> None:
    """Nothing to do: the root is here."""
    _check(groups)
    if root_ordinal:
        raise ValueError(f"root_ordinal={root_ordinal}: this process, 0, is the only one")


def reduce_scatter(
    reduce_type: str,
    input: Any,
    scale: float,
    scatter_dim: int,
    shard_count: int,
    groups: Sequence[Sequence[int]] | None = None,
    output: Any = None,
    pin_layout: bool = True,
    channel_id: int | None = None,
    use_global_device_ids: bool | None = None,
) -> Any:
    """The input times ``scale``: its only shard.

    Raises:
        ValueError: ``shard_count`` is not 1.
    """
    _check(groups, reduce_type)
    if shard_count != 1:
        raise ValueError(f"shard_count={shard_count}: this process is the only one")
    one = isinstance(input, torch.Tensor)
    made = [t.clone() if scale == 1.0 else t * scale for t in ([input] if one else input)]
    if output is None:
        return made[0] if one else made
    for into, value in zip([output] if one else output, made, strict=True):
        into.copy_(value)
    return output


def reduce_scatter_bucketized(
    reduce_type: str, input_list: Any, scale: float = 1.0, scatter_dim: int = 0, shard_count: int = 1, **options: Any
) -> Any:
    """As `reduce_scatter` for each tensor."""
    return reduce_scatter(
        reduce_type, input_list, scale, scatter_dim, shard_count, options.get("groups"), options.get("output")
    )


class CoalescingBuckets:
    """Collects tensors and hands them to ``func`` in buckets."""

    def __init__(
        self, func: Callable[..., Any], input_list: Any, output_list: Any = None, bucket_cap_mb: int = 160
    ) -> None:
        self._func, self._inputs, self._outputs = func, input_list, output_list

    def __call__(self) -> Any:
        return self._func(self._inputs, self._outputs)


def reduce_gradients(
    optimizer: torch.optim.Optimizer, groups: Any = None, pin_layout: bool = True, reduce: str = "mean"
) -> None:
    """Nothing to do: the sum, or mean, over one process is the gradient itself."""
    _check(groups)


def all_reduce_bucketized_gradients(
    gradients: Sequence[torch.Tensor], scale: float, groups: Any, pin_layout: bool, bucket_cap_mb: int = 0
) -> None:
    """Scales the gradients."""
    all_reduce(REDUCE_SUM, list(gradients), scale, groups)


def broadcast_master_param(model: torch.nn.Module) -> None:
    """Nothing to do: this process is the master."""


def rendezvous(tag: str, payload: bytes = b"", replicas: Sequence[int] | None = None) -> list[bytes]:
    """The payloads of all processes that meet at ``tag``: this one's."""
    return [payload]


def xla_rendezvous(payload: bytes = b"", ordinals: Sequence[int] | None = None, tag: str | None = None) -> list[bytes]:
    """As `rendezvous`."""
    return [payload]


def mesh_reduce(tag: str, data: T, reduce_fn: Callable[[list[T]], Any]) -> Any:
    """``reduce_fn`` of the list of every process's data."""
    return reduce_fn([data])


def do_on_ordinals(target: Callable[..., Any], data: Any = (), ordinals: Sequence[int] = (0,)) -> None:
    """Calls ``target(*data)`` in the processes of ``ordinals``."""
    if 0 in ordinals:
        target(*data)
