"""What a tensor is, as torch_xla's ``_get_xla_tensor_debug_info`` writes it."""

from __future__ import annotations

import torch

import lazytpu
from lazytpu.compat.torch_xla.core import world
from lazytpu.compat.torch_xla.distributed.spmd.xla_sharded_tensor import sharding_spec_of
from lazytpu.ir.tree import trace
from lazytpu.tensors.storage import resolve
from lazytpu.tensors.unsent import Unsent
from lazytpu.tracing.record import cell_of
from lazytpu.tracing.sharding import is_result


def text_of(tensor: torch.Tensor) -> str:
    """Return whether a tensor is computed still, or else where its contents are and how they lie."""
    storage, layout = resolve(cell_of(tensor))
    device = "SPMD:0" if world.is_spmd() else f"{lazytpu.platform().upper()}:0"
    lies, on_host = sharding_spec_of(tensor), "None"
    lines = ["XLATensor {", f"Device: {device}"]
    if isinstance(storage, Unsent) and not is_result(tensor):
        lines += ["IR: None", "XLAData: None"]
        lies, on_host = "", f"with size {list(tensor.shape)}"
    elif is_result(tensor) or storage.buffer is None:
        lines += [f"IR: {lazytpu.ir_text(tensor)}", "XLAData: None"]
        lies = lies or ("chosen by XLA" if trace.mesh is not None else "")
    else:
        count = len(storage.buffer.sharding.device_set)
        kind, lies = ("XLAShardedData", lies or "{replicated}") if count > 1 else ("XLAData", lies)
        lines += ["IR: xla::device_data", f"XLAData: {kind} {{", f"  Data Device: {device}"]
        lines += [f"  Data Shape: {layout.describe()}", f"  OpSharding: {lies or '{replicated}'}"]
        lines += [f"  NumShards: {count}", "}"]
    return "\n".join([*lines, f"ShardingSpec: {lies or None}", f"Tensor on host: {on_host}", "}"]) + "\n"
