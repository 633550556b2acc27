"""``XlaFullyShardedDataParallel``: a module whose parameters are split over all devices.

There, each process has one device and gives its part of a batch.  Here one process has all devices and gives the whole
batch, split over them or not; losses and gradients are those of the whole batch in both.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from lazytpu import spmd
from lazytpu.compat import names
from lazytpu.compat.torch_xla.distributed.fsdp.wrap import Policy, wrap_submodules
from lazytpu.compat.torch_xla.distributed.fsdp.wrapper import Wrapper
from lazytpu.runtime import world

__getattr__ = names.missing_from(__name__)
_T = TypeVar("_T")


class XlaFullyShardedDataParallel(Wrapper):
    """A module on the device, whose parameters, gradients and state of optimizers are split over all devices.

    XLA gathers a parameter where it is used, so the options that say when and how torch_xla does are taken and have no
    effect, such as ``reshard_after_forward`` and ``flatten_parameters``.

    Args:
        module: on the device, or moved there.
        compute_dtype: that parameters and what goes in are cast to in the forward pass.
        buffer_dtype: that buffers are cast to; by default the same.
        auto_wrap_policy: says which submodules are wrapped, too: one of ``torch_xla.distributed.fsdp.wrap``.
        auto_wrapper_callable: what wraps these; by default this class.
        param_init_fn: called with the module where parameters are on the device meta.
        options: of torch_xla.

    Raises:
        NotImplementedError: there are several processes.
        TypeError: torch_xla has no such option.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        compute_dtype: torch.dtype | None = None,
        buffer_dtype: torch.dtype | None = None,
        auto_wrap_policy: Policy | None = None,
        auto_wrapper_callable: Callable[..., nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], object] | None = None,
        **options: object,
    ) -> None:
        super().__init__()
        unknown = [name for name in options if name not in _OPTIONS and not name.startswith("_")]
        if unknown:
            raise TypeError(f"unexpected keyword argument {unknown[0]!r}")
        if world.size() > 1:
            raise NotImplementedError(
                "XlaFullyShardedDataParallel splits over the devices of one process; "
                "use torch.distributed.fsdp.fully_shard"
            )
        if any(p.is_meta for p in module.parameters()) and param_init_fn is not None:
            param_init_fn(module)
        self.compute_dtype = compute_dtype
        self.buffer_dtype = buffer_dtype or compute_dtype
        if auto_wrap_policy is not None:
            given = {"compute_dtype": compute_dtype, "buffer_dtype": buffer_dtype, **options}
            wrapper: Callable[..., nn.Module] = auto_wrapper_callable or XlaFullyShardedDataParallel
            wrap_submodules(module, auto_wrap_policy, lambda inner: wrapper(inner, **given))
        self.add_module(self.inner_name, spmd.fully_shard(module, spmd.Mesh((-1,), ("fsdp",))))

    def forward(self, *args: object, **kwargs: object) -> object:
        """Call the module inside."""
        if self.compute_dtype is None and self.buffer_dtype is None:
            return self.module(*args, **kwargs)
        args, kwargs = _cast((args, kwargs), self.compute_dtype)
        own = {
            name: _cast(x, dtype)
            for named, dtype in (
                (self._own("parameters"), self.compute_dtype),
                (self._own("buffers"), self.buffer_dtype),
            )
            for name, x in named.items()
        }
        return functional_call(self.module, own, args, kwargs)

    def _own(self, kind: str) -> dict[str, torch.Tensor]:
        """Return the parameters or buffers that no wrapper inside takes care of."""
        inner = [name for name, module in self.module.named_modules() if isinstance(module, Wrapper)]
        named = self.module.named_parameters() if kind == "parameters" else self.module.named_buffers()
        return {name: x for name, x in named if not any(name.startswith(f"{of}.") for of in inner)}

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, groups: list[list[int]] | None = None
    ) -> torch.Tensor:
        """Scale the gradients so that their norm, over all devices, is at most ``max_norm``; return what it was."""
        return torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)

    def no_sync(self) -> AbstractContextManager[None]:
        """Do nothing: XLA adds gradients up where they are needed."""
        return nullcontext()

    def get_shard_metadata(self) -> dict[str, object]:
        """Return what to save beside the state for `consolidate_sharded_model_checkpoints`: a state is whole here."""
        return {"shard_info": {}, "flatten_info": {}, "buffer_info": {}, "world_size": 1, "rank": 0}


def _cast(given: _T, dtype: torch.dtype | None) -> _T:
    if dtype is None:
        return given
    found: _T = tree_map_only(torch.Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, given)
    return found


_OPTIONS = {
    "reshard_after_forward",
    "flatten_parameters",
    "execute_sharding_on_init",
    "optimization_barrier_in_forward",
    "optimization_barrier_in_backward",
    "sync_on_finalization",
    "mark_step_on_finalization",
    "disable_reshard_on_root",
    "fp32_reduce_scatter",
    "sharding_groups",
    "sharding_rank",
    "sharding_world_size",
    "shard_param_on_dim_0",
    "pin_layout_in_collective_ops",
    "reduce_scatter_bucket_size_mb",
    "coalesce_all_gather_ops",
}
