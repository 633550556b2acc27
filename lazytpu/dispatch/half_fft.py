"""Fourier transforms of half precision, which torch's C++ has for CUDA only: computed in float32.

Those of float16 are rounded at the end.  There is no complex type of bfloat16: since torch 2.15 results are float32's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from lazytpu.dispatch.outputs import with_out
from lazytpu.ir.op_schema import OpOverload, aten

_TRANSFORMS = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
_HALF = {torch.float32: torch.float16, torch.complex64: torch.complex32}
_TAKEN = {torch.float16, torch.bfloat16} if torch.__version__ >= "2.15" else {torch.float16}


def kernels() -> Iterator[tuple[str, Callable[..., object]]]:
    """Return the kernel of each of ``torch.fft``'s transforms, with its name in aten."""
    for transform in _TRANSFORMS:
        for dims in ("", "2", "n"):
            name = f"fft_{transform}{dims}"
            packet = getattr(aten, name)
            yield name, _kernel(packet.default)
            yield f"{name}.out", _out_kernel(packet.out, packet.default)


def _kernel(overload: OpOverload) -> Callable[..., Tensor]:
    def transform(x: Tensor, *args: object, **kwargs: object) -> Tensor:
        if x.dtype not in _TAKEN:
            result: Tensor = overload.decompose(x, *args, **kwargs)
            return result
        result = overload(x.to(torch.float32), *args, **kwargs)
        return result.to(_HALF[result.dtype]) if x.dtype is torch.float16 else result

    return transform


def _out_kernel(overload: OpOverload, variant: OpOverload) -> Callable[..., object]:
    in_half = with_out(overload, variant)

    def transform(x: Tensor, *args: object, **kwargs: object) -> object:
        if x.dtype in _TAKEN:
            return in_half(x, *args, **kwargs)
        result: object = overload.decompose(x, *args, **kwargs)
        return result

    return transform
