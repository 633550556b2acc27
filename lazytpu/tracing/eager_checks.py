"""Ask the CPU's kernel of an op, on sample tensors, what a meta kernel does not know.

`check` raises for the arguments of a node what eager torch raises for them, and a meta kernel lets pass: what the
CPU's kernel refuses whatever the samples hold is an error about dtypes, ranks or attributes.

`with_eager_strides` has results lie as the CPU's kernel lays them out.  Where operands lie as created, meta kernels
agree with it.  Elsewhere some lay out dimensions of one element in their own way, or give rows where the CPU keeps the
order of the operand.

Samples are of the sizes of the operands if these are small, and of a few elements if not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from lazytpu.ir.op_schema import Op, OpOverload, aten
from lazytpu.ir.tree import Number, Value
from lazytpu.ir.types import Size, TensorType, is_dense
from lazytpu.tensors.layout import Layout, root_layout
from lazytpu.tracing.sample_tensors import LARGE, Resize, argument_names, call_with_samples, dry_run, error_of

_Layouts = tuple[Layout | None, ...]

_SMALL = 1 << 12  # elements of the largest tensor whose sample has the same sizes
_MAX_ACCEPTED = 1 << 14

# The CPU has no kernels of many an op in other dtypes than these.
_JUDGED = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_JUDGED |= {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128}

# Kernels that follow their integers through memory without looking, take more than the CPU's version of them, or look
# at strides, which small samples do not have.
_NOT_RUN = {
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

# Their results lie in rows, or as the meta kernels say, which look at more than sizes and strides.
_KNOWN = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.clone.default,
    aten._to_copy.default,
    aten.convolution.default,
    aten.convolution_backward.default,
}

_ASKED_ALWAYS = {
    aten._fft_r2c.default,
    aten._fft_c2c.default,
    aten._fft_c2r.default,
    aten._linalg_svd.default,
    aten.linalg_lstsq.default,  # but for tall matrices, whose solution has gaps
}

# Integers that go with operands of any size.  Others may be sizes of operands, which kernels follow without looking.
_FIT_ALL = {"dim", "dims", "dim0", "dim1", "correction", "normalization", "pad", "padding", "output_size"}

_accepted: dict[object, None] = {}


class _NotSimilarError(Exception):
    """Small samples cannot stand for the operands, or their results not for the results."""


def check(op: Op, named: Mapping[str, object], results: Iterable[TensorType | None]) -> None:
    """Raise what the CPU's kernel raises for arguments of a node that the meta kernel took.

    Args:
        op: what was called.
        named: the arguments by name, with a `Value` for each tensor.
        results: the layouts that the meta kernel gives.
    """
    named = {name: x for name, x in named.items() if name in argument_names(op.overload)}
    layouts = list(_layouts_in(list(named.values())))
    judged = all(layout.dtype in _JUDGED for layout in layouts)
    if op.recorded in _NOT_RUN or not (judged or any(0 in layout.size for layout in layouts)):
        return
    if _has_scalar_made_dynamic(op, named):
        return  # the op may refuse some of its values
    numels = [prod(layout.size) for layout in (*layouts, *results) if layout is not None]
    small = max(numels, default=0) <= _SMALL
    if not small and not layouts:
        return  # a factory: its sizes are attributes, which cannot be made smaller
    resize: Resize = int if small else _smaller(layouts)
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


def _has_scalar_made_dynamic(op: Op, named: Mapping[str, object]) -> bool:
    """Return whether one of the arguments is an attribute that was seen to change."""
    return any(
        type(x) is Number and op.arguments[op.positions[name]].kind not in _SCALAR_INPUTS for name, x in named.items()
    )


def _layouts_in(x: object) -> Iterable[TensorType]:
    """Yield the types of the values in an argument."""
    if type(x) is Value:
        yield x.layout
    elif isinstance(x, (list, tuple)):
        for e in x:
            yield from _layouts_in(e)


def _smaller(layouts: Iterable[TensorType]) -> Resize:
    """Return what makes sizes small: equal ones for equal sizes, and larger ones for larger."""
    different = sorted({n for layout in layouts for n in layout.size if n > 1})
    sizes = {n: i + 3 for i, n in enumerate(different)}  # of 2, a variance may have no degree of freedom
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
    return all(t.numel() <= _SMALL for t in results if isinstance(t, torch.Tensor))


def with_eager_strides(op: Op, named: Mapping[str, object], layouts: _Layouts) -> _Layouts:
    """Return the layouts of results, which the meta kernel gave, with the strides that the CPU's kernel gives.

    It is asked of ops in `_ASKED_ALWAYS`, and of others where an operand does not lie as created.
    """
    operands = list(_layouts_in(list(named.values())))
    if op.overload is not op.recorded or op.recorded not in _ASKED_ALWAYS and all(x.as_created for x in operands):
        return layouts
    if op.recorded.namespace != "aten" or op.recorded in _KNOWN or op.recorded in _NOT_RUN:
        return layouts
    made = [x for x in layouts if x is not None]
    if all(len(x.size) < 2 for x in made) or _has_scalar_made_dynamic(op, named):
        return layouts
    if any(0 in x.size for x in (*operands, *made)):
        return layouts
    if _may_hold_indices(operands) and op.recorded is not torch.ops.aten.index.Tensor:  # whose kernel looks at them
        return layouts
    small = max(prod(x.size) for x in (*operands, *made)) <= _SMALL
    if not small and any(_holds_integers(x) and name not in _FIT_ALL for name, x in named.items()):
        return layouts
    resize: Resize = int if small else _smaller(operands)
    try:
        samples = {name: _sample_of(x, resize) for name, x in named.items()}
        results = tree_leaves(dry_run(op.recorded, samples))
        if len(results) != len(layouts):
            return layouts
        return tuple([x and _laid_out(x, result) for x, result in zip(layouts, results, strict=True)])
    except Exception:  # attributes that do not go with smaller sizes, a dtype that the CPU lacks
        return layouts


def _may_hold_indices(operands: Sequence[TensorType]) -> bool:
    """Return whether integers stand beside other numbers: kernels may follow them through memory without looking."""
    integers = [not (x.dtype.is_floating_point or x.dtype.is_complex or x.dtype == torch.bool) for x in operands]
    return any(integers) and not all(integers)


def _holds_integers(x: object) -> bool:
    if isinstance(x, (list, tuple)):
        return any(map(_holds_integers, x))
    return type(x) is int


def _sample_of(x: object, resize: Resize) -> object:
    """Return a meta tensor that lies like a value, others in lists; anything else as it is."""
    if isinstance(x, (list, tuple)):
        return [_sample_of(e, resize) for e in x]
    if type(x) is not Value:
        return x
    size = tuple(map(resize, x.layout.size))
    stride = x.layout.stride if size == x.layout.size else _scaled(x.layout.size, x.layout.stride, size)
    return torch.empty_strided(size, stride, dtype=x.layout.dtype, device="meta")


def _scaled(size: Size, stride: Size, other: Size) -> Size:
    """Return the strides of a tensor of sizes ``other`` whose dimensions nest as those of ``size`` and ``stride`` do.

    Raises:
        _NotSimilarError: a dimension lies across others.
    """
    steps, step, scaled = {0: 0, 1: 1}, (1, 1), [0] * len(size)
    for d in sorted(range(len(size)), key=lambda d: (stride[d], size[d])):
        if size[d] == 1 or stride[d] == 0:
            continue
        if stride[d] < step[0]:
            raise _NotSimilarError
        scaled[d] = step[1] * (1 if stride[d] == step[0] else 2)  # 2: there is a gap
        steps[stride[d]] = scaled[d]
        step = stride[d] * size[d], scaled[d] * other[d]
        steps[step[0]] = step[1]
    for d, n in enumerate(size):
        if n == 1:
            if stride[d] not in steps:
                raise _NotSimilarError
            scaled[d] = steps[stride[d]]
    return tuple(scaled)


def _laid_out(layout: Layout, result: object) -> Layout:
    """Return a layout with strides in the order of those of a result, which may be of other sizes."""
    if not isinstance(result, torch.Tensor) or result.dtype != layout.dtype or result.dim() != len(layout.size):
        raise _NotSimilarError
    if [n == 1 for n in result.shape] != [n == 1 for n in layout.size]:
        raise _NotSimilarError
    size, stride = tuple(result.shape), result.stride()
    if not is_dense(size, stride):
        raise _NotSimilarError
    return root_layout(layout.size, stride if size == layout.size else _scaled(size, stride, layout.size), layout.dtype)
