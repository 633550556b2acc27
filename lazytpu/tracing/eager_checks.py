"""Eager checks: raise for the arguments of a node what eager torch raises for them, and a meta kernel lets pass.

The CPU's own kernel is run once for each kind of arguments, on sample tensors: of the same sizes if these are small,
and of a few elements if not.  What it refuses whatever the samples hold is an error about dtypes, ranks or attributes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

import torch

from lazytpu.ir.op_schema import Op, OpOverload, aten
from lazytpu.ir.tree import Number, Value
from lazytpu.ir.types import TensorType
from lazytpu.tracing.sample_tensors import LARGE, Resize, argument_names, call_with_samples, error_of

SMALL = 1 << 12  # elements of the largest tensor whose sample has the same sizes
_MAX_ACCEPTED = 1 << 14

# The CPU has no kernels of many an op in other dtypes than these.
_JUDGED = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_JUDGED |= {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}

# Kernels that follow their integers through memory without looking, take more than the CPU's version of them, or look
# at strides, which small samples do not have.
NOT_RUN = {
    aten._grouped_mm.default,
    aten._padded_dense_to_jagged_forward.default,
    aten.linalg_lu_solve.default,
    aten.linalg_ldl_solve.default,
    aten.segment_reduce.default,
    aten._segment_reduce_backward.default,
    aten._embedding_bag_backward.default,
    aten._embedding_bag_dense_backward.default,
    aten._embedding_bag_per_sample_weights_backward.default,
}

_KERNEL_BY_SIZE = {aten._cdist_forward.default}  # the CPU takes products for many points, in dtypes of their own

_SCALAR_INPUTS = {"number", "numbers", "tensor", "tensors"}  # arguments whose scalars are inputs from the start

_accepted: dict[object, None] = {}


def check(op: Op, named: Mapping[str, object], results: Iterable[TensorType | None]) -> None:
    """Raise what the CPU's kernel raises for arguments of a node that the meta kernel took.

    Args:
        op: what was called.
        named: the arguments by name, with a `Value` for each tensor.
        results: the layouts that the meta kernel gives.
    """
    named = {name: x for name, x in named.items() if name in argument_names(op.overload)}
    layouts = list(layouts_in(list(named.values())))
    judged = all(layout.dtype in _JUDGED for layout in layouts)
    if op.recorded in NOT_RUN or not (judged or any(0 in layout.size for layout in layouts)):
        return
    if has_scalar_made_dynamic(op, named):
        return  # the op may refuse some of its values
    numels = [prod(layout.size) for layout in (*layouts, *results) if layout is not None]
    small = max(numels, default=0) <= SMALL
    if not small and not layouts:
        return  # a factory: its sizes are attributes, which cannot be made smaller
    resize: Resize = int if small else smaller(layouts)
    key = op, tuple([(name, _kind_of(x, resize)) for name, x in named.items()])
    if key in _accepted:
        return
    error = error_of(op.overload, named, resize) if small or _fits(op.overload, named, resize) else None
    if error is not None and not small:  # is it that the attributes do not go with the smaller sizes?
        if sum(numels) <= LARGE:
            error = error_of(op.overload, named, int)
        elif not isinstance(error, NotImplementedError) or op.recorded in _KERNEL_BY_SIZE:  # that is about dtypes
            error = None
    try:
        if error is not None and (judged or isinstance(error, IndexError)):  # an IndexError is about the sizes
            raise error
    finally:
        del error  # a cycle of it and this frame would hold the frames that called, and the tensors in them
    if len(_accepted) >= _MAX_ACCEPTED:
        _accepted.clear()
    _accepted[key] = None


def has_scalar_made_dynamic(op: Op, named: Mapping[str, object]) -> bool:
    """Return whether one of the arguments is an attribute that was seen to change."""
    return any(
        type(x) is Number and op.arguments[op.positions[name]].kind not in _SCALAR_INPUTS for name, x in named.items()
    )


def layouts_in(x: object) -> Iterable[TensorType]:
    """Yield the types of the values in an argument."""
    if type(x) is Value:
        yield x.layout
    elif isinstance(x, (list, tuple)):
        for e in x:
            yield from layouts_in(e)


def smaller(layouts: Iterable[TensorType]) -> Resize:
    """Return what makes sizes small: equal ones for equal sizes, and larger ones for larger."""
    different = sorted({n for layout in layouts for n in layout.size if n > 1})
    sizes = {n: i + 2 for i, n in enumerate(different)}
    return lambda n: sizes.get(n, n)


def _kind_of(x: object, resize: Resize) -> object:
    """Return what a check of an argument depends on."""
    if type(x) is Value:
        return tuple([resize(n) for n in x.layout.size]), x.layout.dtype
    if type(x) is Number:
        return x.dtype
    if isinstance(x, (list, tuple)):
        return tuple([_kind_of(e, resize) for e in x])
    return type(x), repr(x)  # nan equals itself then, and -0.0 is not 0.0


def _fits(overload: OpOverload, named: Mapping[str, Any], resize: Resize) -> bool:
    """Return whether smaller samples go with the attributes, and the results are small as well."""
    try:
        made = call_with_samples(overload, named, "meta", resize=resize)
    except Exception:
        return False
    results = made if isinstance(made, (list, tuple)) else [made]
    return all(t.numel() <= SMALL for t in results if isinstance(t, torch.Tensor))
