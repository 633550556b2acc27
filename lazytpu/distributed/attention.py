"""Attention of ``DTensor``: by batch and heads without a collective, and by the sequence in ``context_parallel``.

Torch has this for the forms of attention of CUDA; the device records another op.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

import torch

from lazytpu.ir.op_schema import Arg, aten
from lazytpu.torch_backend.after_import import after_import

_TENSORS = "torch.distributed.tensor"
_RING = f"{_TENSORS}.experimental._context_parallel._attention"
_FORWARD = aten._scaled_dot_product_fused_attention_overrideable.default
_BACKWARD = aten._scaled_dot_product_fused_attention_overrideable_backward.default
_SEQUENCE = 2  # dimension of queries, keys and values
_SEEDS = 2  # that stand for the dropped weights, the same on all ranks
_RESULTS, _LATER = 2, 4  # result and logarithms of sums; lengths, which are no tensors


def register() -> None:
    """Wait for DTensor, and for context parallelism."""
    after_import(_TENSORS, _register_shardings)
    after_import(_RING, _register_rings)


def _register_shardings(module: ModuleType) -> None:
    from torch.distributed.tensor.experimental import register_sharding

    replicate, shard = module.Replicate, module.Shard

    def of_all(results: int, rest: int) -> Callable[..., list[tuple[list[Arg], list[Arg]]]]:
        """Return a rule: tensors are split alike, along the batch or the heads, or not at all."""

        def rule(*args: Arg, **kwargs: Arg) -> list[tuple[list[Arg], list[Arg]]]:
            found = []
            for placement in (replicate(), shard(0), shard(1)):
                inputs = [_placement(x, placement, replicate()) for x in args]
                outputs = [placement] * results
                if rest:
                    outputs += [None] * _LATER + [replicate()] * _SEEDS + [None]
                found.append((outputs, inputs + [None] * len(kwargs)))
            return found

        return rule

    register_sharding(_FORWARD)(of_all(_RESULTS, 1))
    register_sharding(_BACKWARD)(of_all(4, 0))


def _placement(x: Arg, split: Arg, whole: Arg) -> Arg:
    """Return how an operand lies: seeds, and what is no tensor, are not split."""
    if not hasattr(x, "shape"):
        return None
    return split if len(x.shape) > 1 else whole


def _register_rings(module: ModuleType) -> None:
    rings = {_FORWARD: module._templated_ring_attention, _BACKWARD: module._templated_ring_attention_backward}
    packets = {_FORWARD: aten._scaled_dot_product_fused_attention_overrideable, _BACKWARD: _BACKWARD}

    def attend(op: Arg, args: Sequence[Arg], kwargs: Mapping[str, Arg]) -> tuple[Arg, ...]:
        """Do attention of which each rank has a part of the sequence: keys and values go round."""
        names = [argument.name for argument in op._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        given.pop("return_debug_mask", None)
        like = given["query"]
        if given.get("attn_bias") is not None:
            raise NotImplementedError("context_parallel takes no attn_mask, only is_causal")
        if like.dtype == torch.float64:
            raise NotImplementedError("context_parallel takes float32 and less: torch keeps float32 of sums of float64")
        local = {name: x.to_local() if isinstance(x, type(like)) else x for name, x in given.items()}
        if op is _BACKWARD:
            local["grad_out_name"] = "grad_out"
        found = rings[op](like.device_mesh.get_group(), _SEQUENCE, packets[op], **local)
        split = _RESULTS if op is _FORWARD else 3
        parts = [type(like).from_local(x, like.device_mesh, like.placements, run_check=False) for x in found[:split]]
        return (*parts, *found[split:])

    vars(module)["custom_ops"].update({_FORWARD: attend, _BACKWARD: attend})
