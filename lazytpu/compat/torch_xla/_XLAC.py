"""The functions of torch_xla's C++ module that scripts call to look at graphs."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence

import torch

import lazytpu
from lazytpu import spmd
from lazytpu.compat import names
from lazytpu.compat.torch_xla import auto_sharding, backends, debug_info, metrics_format, preemption
from lazytpu.compat.torch_xla import lowering as lowering
from lazytpu.compat.torch_xla.core import xla_model
from lazytpu.compat.torch_xla.distributed.spmd import manual, xla_sharded_tensor
from lazytpu.compat.torch_xla.distributed.spmd.op_sharding import OpSharding, ShardingType
from lazytpu.debug.graph_text import gspmd
from lazytpu.ir.printer import graph_text
from lazytpu.tracing.reading import pending_graph

__getattr__ = names.missing_from(__name__)


_get_xla_sharding_spec = xla_sharded_tensor.sharding_spec_of
_get_xla_tensor_debug_info = debug_info.text_of
_activate_preemption_sync_manager = preemption.watch
_deactivate_preemption_sync_manager = preemption.stop
_sync_point_reached = preemption.asked
_xla_metrics_report = metrics_format.report
_xla_real_devices = xla_model.xla_real_devices
_xla_set_mat_mul_precision = backends.set_mat_mul_precision
_xla_get_mat_mul_precision = backends.get_mat_mul_precision
_spmd_full_to_shard_shape = manual.full_to_shard_shape
_spmd_shard_to_full_shape = manual.shard_to_full_shape
_xla_get_auto_sharding = auto_sharding.is_on


def _get_xla_tensors_text(tensors: Sequence[torch.Tensor]) -> str:
    """Return the IR of the pending graph of some tensors."""
    return lazytpu.ir_text(*tensors)


def _get_xla_tensors_dot(tensors: Sequence[torch.Tensor]) -> str:
    """Return the same for Graphviz."""
    return lazytpu.ir_dot(*tensors)


def _get_xla_tensors_hlo(tensors: Sequence[torch.Tensor]) -> str:
    """Return its HLO, that of a device if ``XLA_DUMP_POST_OPTIMIZATIONS`` is set."""
    if os.environ.get("XLA_DUMP_POST_OPTIMIZATIONS") in ("1", "true"):
        return lazytpu.hlo_text(*tensors, optimized=True)
    with gspmd():
        return lazytpu.hlo_text(*tensors)


def _get_graph_hash(tensors: Sequence[torch.Tensor]) -> bytes:
    """Return a hash of the pending graph of some tensors, whatever its numbers are, and of the automatic sharding."""
    names: dict[str, str] = {}  # of numbers: the step counts them, which is no part of this graph
    text = graph_text(pending_graph(tuple(tensors)), sites=False)
    text = re.sub(r"%[snz]\d+", lambda name: names.setdefault(name[0], f"{name[0][:2]}{len(names)}"), text)
    return hashlib.sha256(f"{text} {auto_sharding.setting()}".encode()).digest()


def _get_xla_sharding_type(tensor: torch.Tensor) -> int | None:
    """Return the number of its kind of sharding; None without one."""
    found = xla_sharded_tensor.sharding_type_of(tensor)
    return None if found is None else int(found)


def _xla_mark_sharding(tensor: torch.Tensor, sharding: OpSharding) -> None:
    """Split a tensor over devices."""
    spmd.mark_sharding(tensor, sharding.mesh, sharding.spec)


_xla_annotate_custom_sharding = _xla_mark_sharding


def _xla_spmd_all_reduce(
    reduce_type: str, tensor: torch.Tensor, scale: float, groups: Sequence[Sequence[int]]
) -> torch.Tensor:
    """See `torch_xla.core.xla_model.all_reduce`, of parts that devices have."""
    return xla_model.all_reduce(reduce_type, manual._part(tensor), scale, groups)


def _xla_spmd_reduce_scatter(
    reduce_type: str,
    tensor: torch.Tensor,
    scale: float,
    scatter_dim: int,
    shard_count: int,
    groups: Sequence[Sequence[int]],
) -> torch.Tensor:
    """See `torch_xla.core.xla_model.reduce_scatter`, of parts that devices have."""
    part = manual._part(tensor)
    return xla_model.reduce_scatter(reduce_type, part, scale, scatter_dim, shard_count, groups)


def _global_tensor_from_cpu_shards(
    shards: Sequence[torch.Tensor], sharding: OpSharding, global_shape: torch.Size | None = None
) -> torch.Tensor:
    """Return a tensor of the device from the parts that its devices have.

    Args:
        shards: one a device, in the order of their ids, of equal shapes on the CPU.
        sharding: which part each is.
        global_shape: of the tensor, by default that of all parts together; what they have beyond it is left out.

    Raises:
        RuntimeError: there is not one part for each device, or the tensor has not such parts.
    """
    count, shape = sharding.mesh.size, shards[0].shape
    if len(shards) != count or any(part.shape != shape for part in shards):
        raise RuntimeError(f"{count} parts of one shape are needed, not {[tuple(part.shape) for part in shards]}")
    counts = sharding.counts or (1,) * len(shape)
    if sharding.sharding_type == ShardingType.REPLICATED or len(counts) != len(shape):
        counts = (1,) * len(shape)
    padded = [n * k for n, k in zip(shape, counts, strict=True)]
    size = torch.Size(padded) if global_shape is None else global_shape
    if len(size) != len(shape) or any(-(-n // k) != m for n, k, m in zip(size, counts, shape, strict=True)):
        raise RuntimeError(f"a tensor of shape {list(size)} in {counts} parts has none of shape {list(shape)}")
    whole = torch.empty(padded, dtype=shards[0].dtype)
    for device, part in enumerate(shards):
        place = sharding.place_of(device) if sharding.counts else (0,) * len(shape)
        whole[tuple([slice(i * n, i * n + n) for i, n in zip(place, shape, strict=True)])] = part
    found = whole[tuple([slice(0, n) for n in size])].to(lazytpu.device())
    _xla_mark_sharding(found, sharding)
    return found


def _xla_sync_multi(tensors: Sequence[torch.Tensor], devices: Sequence[str] = (), wait: bool = True) -> None:
    """Run what is pending."""
    lazytpu.mark_step(wait=wait)


def _xla_step_marker(device: str = "", devices: Sequence[str] = (), wait: bool = False, **_: object) -> None:
    """End a step."""
    lazytpu.mark_step(wait=wait)


def _ensure_xla_coordinator_initialized(*_: object, **__: object) -> None:
    """Do nothing: processes find each other when the device is first used."""


def _xla_get_default_device() -> str:
    """Return the device's name."""
    return str(lazytpu.device())


def _get_executed_fallback_ops() -> list[str]:
    """See `torch_xla.debug.metrics.executed_fallback_ops`."""
    return sorted(lazytpu.metrics.fallbacks())
