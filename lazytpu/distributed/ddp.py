"""What DistributedDataParallel does in C++ or once, made to suit a device that records.

What it knows about buckets and sizes it exchanges as a few numbers, which it reads at once.  On the device each of them
would be a program of its own, so they go through the host; all processes do so at the same place.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from lazytpu.config import config
from lazytpu.dispatch import exchange
from lazytpu.distributed import unused_parameters
from lazytpu.ir.op_schema import Arg, aten
from lazytpu.runtime import transfers
from lazytpu.tensors.storage import resolve, write_buffer
from lazytpu.tracing.record import cell_of, is_device_tensor

_P = ParamSpec("_P")
_R = TypeVar("_R")

through_host: list[bool] = []
"""Not empty while collectives go through the host."""


def during(flags: list[bool], function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return a function with a flag set while it runs."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        flags.append(True)
        try:
            return function(*args, **kwargs)
        finally:
            flags.pop()

    return call


class _Filled(TorchDispatchMode):
    """Gives what is allocated contents, so that the step that first writes to it is like the steps after it."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Arg],
        types: object,
        args: tuple[Arg, ...] = (),
        kwargs: Mapping[str, Arg] | None = None,
    ) -> Arg:
        made = func(*args, **(kwargs or {}))
        if func is aten.empty.memory_format and is_device_tensor(made):
            storage, layout = resolve(cell_of(made))
            write_buffer(storage, transfers.to_device(torch.zeros(layout.size, dtype=layout.dtype, device="cpu")))
        return made


def _under(mode: Arg, function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return a function that runs under a mode."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with mode():
            return function(*args, **kwargs)

    return call


def _any_device(check: Callable[[Arg, Callable[..., object]], None]) -> Callable[[Arg, Callable[..., object]], None]:
    """Return a check of hooks that knows that this device has bfloat16, which torch says of NCCL only."""

    @functools.wraps(check)
    def call(self: Arg, hook: Callable[..., object]) -> None:
        if self.device_type == config.device_name and getattr(hook, "__name__", "").startswith("bf16_compress"):
            return
        check(self, hook)

    return call


def register() -> None:
    """Wrap the functions of DDP that do such things."""
    reducer = vars(dist)["Reducer"]
    module = DistributedDataParallel
    reducer._rebuild_buckets = during(through_host, _under(_Filled, reducer._rebuild_buckets))
    reducer.__init__ = _under(unused_parameters.UsedOnHost, reducer.__init__)
    reducer._set_static_graph = _under(unused_parameters.UsedOnHost, reducer._set_static_graph)
    verify = "_verify_params_across_processes"
    vars(dist)[verify] = during(through_host, vars(dist)[verify])
    hooks = "_check_comm_hook"
    setattr(module, hooks, _any_device(getattr(module, hooks)))
    buffers = "_distributed_broadcast_coalesced"  # at each forward pass
    setattr(module, buffers, during(exchange.alike, getattr(module, buffers)))
