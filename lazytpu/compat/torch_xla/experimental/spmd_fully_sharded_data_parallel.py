"""``SpmdFullyShardedDataParallel``: a module whose parameters lie along the axis ``fsdp`` of a mesh."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from lazytpu.compat import names
from lazytpu.compat.torch_xla.distributed.fsdp.wrap import Policy, wrap_submodules
from lazytpu.compat.torch_xla.distributed.fsdp.wrapper import Wrapper
from lazytpu.compat.torch_xla.distributed.spmd.mesh import Axis, Mesh, get_global_mesh
from lazytpu.compat.torch_xla.distributed.spmd.xla_sharding import (
    annotate_custom_sharding,
    mark_sharding,
    unwrap_sharded_tensor,
)
from lazytpu.tensors.tensor import LazyTensor
from lazytpu.tracing.sharding import is_result, sharding_of

__getattr__ = names.missing_from(__name__)
ShardOutput = Callable[[object, Mesh], object]


class SpmdFullyShardedDataParallel(Wrapper):
    """A module on the device, whose parameters are split along their largest dimension, and its output along the first.

    Args:
        module: on the device, or moved there.
        mesh: with an axis named ``fsdp``; by default the one of ``set_global_mesh``.
        shard_output: called with the output and the mesh, to split it; needed where the output is no tensor, nor a
            tuple that begins with one.
        auto_wrap_policy: says which submodules are wrapped, too: one of ``torch_xla.distributed.fsdp.wrap``.
        auto_wrapper_callable: what wraps these; by default this class.
        extra_data_axis: a second axis over which the batch is split.

    Raises:
        ValueError: there is no mesh, or it has no such axes.
    """

    inner_name = "_orig_module"

    def __init__(
        self,
        module: nn.Module,
        *,
        mesh: Mesh | None = None,
        shard_output: ShardOutput | None = None,
        auto_wrap_policy: Policy | None = None,
        auto_wrapper_callable: Callable[..., nn.Module] | None = None,
        extra_data_axis: str | None = None,
    ) -> None:
        super().__init__()
        found = get_global_mesh() if mesh is None else mesh
        if found is None:
            raise ValueError("a mesh is needed: pass mesh=, or call set_global_mesh first")
        if "fsdp" not in (found.axis_names or ()):
            raise ValueError("The mesh must have an axis named 'fsdp'.")
        if extra_data_axis is not None and extra_data_axis not in (found.axis_names or ()):
            raise ValueError(f"The provided {extra_data_axis} axis is not in the mesh.")
        self._mesh, self._extra_data_axis, self._shard_output = found, extra_data_axis, shard_output
        if auto_wrap_policy is not None:
            given = {"mesh": found, "shard_output": shard_output, "extra_data_axis": extra_data_axis}
            wrapper: Callable[..., nn.Module] = auto_wrapper_callable or SpmdFullyShardedDataParallel
            wrap_submodules(module, auto_wrap_policy, lambda inner: wrapper(inner, **given))
        self.add_module(self.inner_name, module.to(LazyTensor.device_type))
        for parameter in module.parameters():
            if sharding_of(parameter) is None:
                mark_sharding(
                    parameter, found, _spec(parameter, parameter.shape.index(max(parameter.shape, default=0)))
                )

    def forward(self, *args: object, **kwargs: object) -> object:
        """Call the module inside, and split its output."""
        output: object = self.module(*args, **kwargs)
        if self._shard_output is not None:
            self._shard_output(output, self._mesh)
            return output
        if isinstance(output, tuple) and output and isinstance(output[0], torch.Tensor):
            return (self._split(output[0]), *output[1:])
        if isinstance(output, torch.Tensor):
            return self._split(output)
        raise RuntimeError(
            f"the output is a {type(output).__name__}: shard_output=function(output, mesh) has to split it"
        )

    def _split(self, output: torch.Tensor) -> torch.Tensor:
        axes = ("fsdp",) if self._extra_data_axis is None else (self._extra_data_axis, "fsdp")
        output = output if is_result(output) else output.clone()
        return unwrap_sharded_tensor(annotate_custom_sharding(output, self._mesh, _spec(output, 0, axes)))


def _spec(tensor: torch.Tensor, dim: int, axes: tuple[str, ...] = ("fsdp",)) -> tuple[tuple[Axis, ...] | None, ...]:
    return tuple([axes if i == dim else None for i in range(tensor.dim())])
