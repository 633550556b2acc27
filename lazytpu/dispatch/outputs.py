"""The kernels of ``out=`` overloads: the functional variant, then a copy into what was given."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch

from lazytpu.dispatch.general import Kernel, call_meta, flat, on_other_device
from lazytpu.ir.op_schema import OpOverload, aten
from lazytpu.tensors.tensor import MixedDevicesError
from lazytpu.tracing.memory_checks import check_outputs, check_overlap, may_alias
from lazytpu.tracing.record import cell_of, is_device_tensor, lock
from lazytpu.tracing.transaction import write_cast


def with_out(overload: OpOverload, variant: OpOverload) -> Kernel:
    """Return the kernel of an ``out=`` overload: the functional variant, then a copy into what was given."""
    names = [a.name for a in overload._schema.arguments if a.is_out]
    positions = {a.name: i for i, a in enumerate(overload._schema.arguments)}
    returned = len(overload._schema.returns)
    pointwise = torch.Tag.pointwise in overload.tags
    in_order = overload._schema.name in _IN_ORDER
    laid_in_order = overload.name().startswith(_LAID_IN_ORDER)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if on_other_device(args, kwargs):
            return call_meta(overload, args, kwargs)
        given = args[: min((positions[n] for n in names), default=len(args))]
        outs = [kwargs[n] if n in kwargs else args[positions[n]] for n in names]
        flat_outs = flat(outs)
        rest = {k: v for k, v in kwargs.items() if k not in names}
        for out in flat_outs:
            if not is_device_tensor(out):
                raise MixedDevicesError(out.device)
        with lock:
            check_outputs(overload, variant, args, kwargs, names)
            if may_alias(flat_outs, flat([*given, *rest.values()]), pointwise=pointwise):
                check_overlap(overload, args, kwargs)
            results = variant(*given, **_factory_arguments(variant, outs, rest))
            results = flat(results if isinstance(results, (list, tuple)) else [results])
            for out, result in zip(flat_outs, results, strict=True):
                if out.shape != result.shape and in_order and out.numel() == result.numel():
                    result = result.view(out.shape)
                elif out.shape != result.shape:
                    if pointwise and any(out is x for x in flat([*given, *rest.values()])):
                        sizes = f"{list(out.shape)} doesn't match the broadcast shape {list(result.shape)}"
                        raise RuntimeError(f"output with shape {sizes}")
                    _resize(out, result.shape, None if laid_in_order else result.stride())
                write_cast(cell_of(out), cell_of(result))
        return None if returned == 0 else outs[0] if returned == 1 else tuple(outs)

    return kernel


def _factory_arguments(variant: OpOverload, outs: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, object]:
    names = {a.name for a in variant._schema.arguments}
    if "device" in names and outs:
        return {**kwargs, "device": outs[0].device, **({"dtype": outs[0].dtype} if "dtype" in names else {})}
    if "dtype" in names and "dtype" not in kwargs and outs and variant._schema.name in _DTYPE_OF_OUT:
        return {**kwargs, "dtype": outs[0].dtype}
    return kwargs


_IN_ORDER = {"aten::arange", "aten::linspace", "aten::logspace", "aten::range"}  # fill any shape of as many elements
_LAID_IN_ORDER = ("aten::_fft_", "aten::cholesky.", "aten::cholesky_solve.")  # whatever the strides of their results
_DTYPE_OF_OUT = {"aten::sum", "aten::prod", "aten::mean", "aten::nansum", "aten::cumsum", "aten::cumprod"}


def _resize(out: torch.Tensor, size: torch.Size, stride: Sequence[int] | None) -> None:
    """Give a tensor that was given as ``out=`` another size, with torch's warning where it has elements."""
    if out.numel():
        warnings.warn(
            f"An output with one or more elements was resized since it had shape {list(out.shape)}, which does not "
            f"match the required output shape {list(size)}. This behavior is deprecated, and in a future PyTorch "
            "release outputs will not be resized unless they have zero elements. You can explicitly reuse an out "
            "tensor t by resizing it, inplace, to zero elements with t.resize_(0).",
            stacklevel=3,
        )
    aten.resize_.default(out, size)
    if stride is not None and out.stride() != stride:
        aten.as_strided_.default(out, size, stride)
