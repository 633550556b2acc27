"""The length of ``arange``, which torch's meta kernel has wrong for numbers that are extreme or not of its dtype."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from lazytpu.ir.op_schema import OpOverload
from lazytpu.tracing.sample_tensors import dry_run

_COUNTS_FLOATS_AS_DOUBLES = torch.__version__ >= "2.14"  # for int64, too; compared as a version, not as text


def arange_on_meta(overload: OpOverload, named: Mapping[str, object]) -> object:
    """Return what ``arange`` gives, on meta.

    Raises:
        RuntimeError: the CPU's error, for numbers that it refuses.
    """
    given = (named.get("start", 0), named["end"], named.get("step", 1))
    numbers = [x for x in given if isinstance(x, (int, float))]
    if len(numbers) < len(given):
        return dry_run(overload, named)
    start, end, step = numbers
    dtype = named.get("dtype")
    if not isinstance(dtype, torch.dtype):
        dtype = torch.int64 if all(isinstance(x, int) for x in numbers) else torch.get_default_dtype()
    try:
        length = _length(start, end, step, dtype)
    except (ArithmeticError, ValueError):
        length = -1
    if length < 0 or (end - start) * step < 0:
        return dry_run(overload, named)  # which raises
    return torch.empty(length, dtype=dtype, device="meta")


def _length(start: float, end: float, step: float, dtype: torch.dtype) -> int:
    """Return how many numbers there are, as the CPU counts: with 64 bits that wrap around, or with doubles."""
    if dtype is not torch.int64 or (_COUNTS_FLOATS_AS_DOUBLES and any(type(x) is float for x in (start, end, step))):
        return math.ceil((float(end) - float(start)) / float(step))
    span = int(end) - int(start) + int(step) - (1 if step > 0 else -1)
    wrapped = (span + (1 << 63)) % (1 << 64) - (1 << 63)
    return abs(wrapped) // abs(int(step)) * (1 if (wrapped < 0) == (step < 0) else -1)
