"""Ask the CPU's kernels how results lie in memory, where an operand does not lie as it would have been created.

For operands that lie as created, the meta kernels agree with the CPU's.  For others some do not: they lay out
dimensions of one element in their own way, or give rows where the CPU keeps the order of the operand.  So the CPU's
kernel is run on sample tensors that lie like the operands, of their sizes if these are small, and of a few elements if
not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch

from lazytpu.ir.op_schema import Op, aten
from lazytpu.ir.tree import Value
from lazytpu.ir.types import Size, TensorType, is_dense
from lazytpu.tensors.layout import Layout, root_layout
from lazytpu.tracing.eager_checks import NOT_RUN, SMALL, has_scalar_made_dynamic, layouts_in, smaller
from lazytpu.tracing.sample_tensors import Resize, dry_run

Layouts = tuple[Layout | None, ...]

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

ASKED_ALWAYS = {
    aten._fft_r2c.default,
    aten._fft_c2c.default,
    aten._fft_c2r.default,
    aten._linalg_svd.default,
    aten.linalg_lstsq.default,  # but for tall matrices, whose solution has gaps
}


# Integers that go with operands of any size.  Others may be sizes of operands, which kernels follow without looking.
_FIT_ALL = {"dim", "dims", "dim0", "dim1", "correction", "normalization", "pad", "padding", "output_size"}


class _NotSimilarError(Exception):
    """Small samples cannot stand for the operands, or their results not for the results."""


def as_on_the_cpu(op: Op, named: Mapping[str, object], layouts: Layouts) -> Layouts:
    """Return the layouts of results, which the meta kernel gave, with the strides that the CPU's kernel gives.

    Asked of ops in `ASKED_ALWAYS`, and of others where an operand does not lie as created.
    """
    operands = list(layouts_in(list(named.values())))
    if op.recorded.namespace != "aten" or op.recorded in _KNOWN or op.recorded in NOT_RUN:
        return layouts
    made = [x for x in layouts if x is not None]
    if all(len(x.size) < 2 for x in made) or has_scalar_made_dynamic(op, named):
        return layouts
    if any(0 in x.size for x in (*operands, *made)) or _may_hold_indices(operands):
        return layouts
    small = max(prod(x.size) for x in (*operands, *made)) <= SMALL
    if not small and any(_holds_integers(x) and name not in _FIT_ALL for name, x in named.items()):
        return layouts
    resize: Resize = int if small else smaller(operands)
    try:
        samples = {name: _sample_of(x, resize) for name, x in named.items()}
        results = _flat(dry_run(op.recorded, samples))
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


def _flat(results: object) -> list[object]:
    if isinstance(results, (list, tuple)):
        return [e for x in results for e in _flat(x)]
    return [results]
