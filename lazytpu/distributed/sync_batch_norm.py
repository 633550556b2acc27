"""Batch norms over the batches of all ranks: what ``nn.SyncBatchNorm`` computes on the device.

Torch's own needs ops that CUDA alone has, and leaves out ranks without a batch by an index, which would be read.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn.modules import batchnorm

from lazytpu.ir.op_schema import Arg
from lazytpu.tracing.record import is_device_tensor

Tensor = torch.Tensor
_NAME = "sync_batch_norm"


class _OverRanks(torch.autograd.Function):
    """The arguments are those of torch's function; half-precision batches are reduced in float32."""

    @staticmethod
    def forward(
        ctx: Arg,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        eps: float,
        momentum: float,
        group: dist.ProcessGroup,
        ranks: int,
    ) -> Tensor:
        wide, channels = _widened(x), x.size(1)
        own = wide.new_zeros(2 * channels + 1)
        if x.numel():
            mean = wide.mean(_dims(x))
            squares = (wide - _spread(mean, x)).square().sum(_dims(x))
            own = torch.cat([mean, squares, wide.new_full((1,), x.numel() // channels)])
        every = own.new_empty(ranks, len(own))
        dist.all_gather_into_tensor(every, own, group)
        means, all_squares, counts = every.split([channels, channels, 1], 1)
        count = counts.sum()
        mean = (means * counts).sum(0) / count
        total = (all_squares + counts * (means - mean).square()).sum(0)
        scale = (total / count + eps).rsqrt()
        if running_mean is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        if running_var is not None:
            running_var.lerp_((total / (count - 1)).to(running_var.dtype), momentum)
        ctx.save_for_backward(x, weight, mean, scale, count)
        ctx.group = group
        out = (wide - _spread(mean, x)) * _spread(scale, x)
        if weight is not None:
            out = out * _spread(weight, x)
        return (out if bias is None else out + _spread(bias, x)).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Arg, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, scale, count = ctx.saved_tensors
        dy, apart = _widened(gradient), _widened(x) - _spread(mean, x)
        own = torch.stack([dy.sum(_dims(x)), (dy * apart).sum(_dims(x))])
        for_weight, for_bias = own[1] * scale, own[0]
        for_x = None
        if ctx.needs_input_grad[0]:
            sums = own.clone()
            dist.all_reduce(sums, group=ctx.group)
            sum_dy, sum_apart = sums / count
            for_x = (dy - _spread(sum_dy, x) - apart * _spread(scale * scale * sum_apart, x)) * _spread(scale, x)
            for_x = (for_x if weight is None else for_x * _spread(weight, x)).to(x.dtype)
        asked = ctx.needs_input_grad[1:3]
        of_parameters = [
            g.to(weight.dtype) if ask else None for g, ask in zip((for_weight, for_bias), asked, strict=True)
        ]
        return for_x, *of_parameters, None, None, None, None, None, None


def _widened(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _dims(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _spread(of_channels: Tensor, x: Tensor) -> Tensor:
    return of_channels.reshape(-1, *[1] * (x.dim() - 2))


class _ByDevice:
    """In place of torch's function: ours for the tensors of the device.

    Args:
        torchs: torch's.
    """

    def __init__(self, torchs: Arg) -> None:
        self._torchs = torchs

    def apply(self, x: Tensor, *rest: Arg) -> Tensor:
        """Return the normalized batch."""
        made: Tensor = (_OverRanks if is_device_tensor(x) else self._torchs).apply(x, *rest)
        return made


def register() -> None:
    """Have ``nn.SyncBatchNorm`` use it."""
    setattr(batchnorm, _NAME, _ByDevice(vars(batchnorm)[_NAME]))
