"""Types of an op for other sizes than those that torch was asked about: those of a batch that varies, say.

Torch's meta kernels take up to a millisecond, and a loop over batches of many sizes asks about each op anew for each.
Many ops do not calculate with sizes: each size of a result is one of an operand's, or 1, and what they refuse depends
on which sizes are equal and which are larger.  Such an op gives for sizes 7 and 10 what it gave for 5 and 10 with each
5 replaced by 7, as long as its sizes stand in the same order, with 0, 1 and the integers among its other arguments.
The ops here are of that kind, where operands and results are row-major; some of them in some dimensions only, and
convolutions and pooling in that of the batch, where no other size equals it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch

from lazytpu.ir.op_schema import Op, OpOverload, aten
from lazytpu.ir.tree import Structure
from lazytpu.ir.types import TensorType
from lazytpu.tensors.layout import Layout, in_rows

Layouts: TypeAlias = tuple[Layout | None, ...]

_MOST_KNOWN = 4096

# Beside those that torch tags as pointwise.
_COPYING = {
    aten._log_softmax.default,
    aten._log_softmax_backward_data.default,
    aten._softmax.default,
    aten._softmax_backward_data.default,
    aten._to_copy.default,
    aten.addmm.default,
    aten.all.dim,
    aten.amax.default,
    aten.amin.default,
    aten.any.dim,
    aten.argmax.default,
    aten.argmin.default,
    aten.bmm.default,
    aten.clone.default,
    aten.cumsum.default,
    aten.embedding.default,
    aten.embedding_dense_backward.default,
    aten.gather.default,
    aten.index_add.default,
    aten.index_select.default,
    aten.isin.Tensor_Tensor,
    aten.linear.default,
    aten.linear_backward.default,
    aten.matmul.default,
    aten.matmul_backward.default,
    aten.max.dim,
    aten.mean.dim,
    aten.min.dim,
    aten.mm.default,
    aten.mse_loss.default,
    aten.mse_loss_backward.default,
    aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default,
    aten.nll_loss_backward.default,
    aten.nll_loss_forward.default,
    aten.ones_like.default,
    aten.scatter_add.default,
    aten.sort.default,
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.topk.default,
    aten.zeros_like.default,
}

# Position of an argument to the dimensions whose sizes are copied, of tensors of four dimensions.
_SOME_DIMS: dict[OpOverload, Mapping[int, tuple[int, ...]]] = {
    aten._scaled_dot_product_fused_attention_overrideable.default: {0: (2,), 1: (2,), 2: (2,), 3: (2, 3)},
    aten._scaled_dot_product_fused_attention_overrideable_backward.default: {
        **dict.fromkeys((0, 1, 2, 3, 6), (2,)),
        4: (2, 3),
        7: (2,),
    },
}

# The same for ops that calculate with the other sizes.
_BATCHED: dict[OpOverload, Mapping[int, tuple[int, ...]]] = {
    aten.convolution.default: {0: (0,)},
    aten.convolution_backward.default: {0: (0,), 1: (0,)},
    aten.max_pool2d_with_indices.default: {0: (0,)},
    aten.max_pool2d_with_indices_backward.default: {0: (0,), 1: (0,), 7: (0,)},
    aten.avg_pool2d.default: {0: (0,)},
    aten.avg_pool2d_backward.default: {0: (0,), 1: (0,)},
    aten._adaptive_avg_pool2d.default: {0: (0,)},
    aten._adaptive_avg_pool2d_backward.default: {0: (0,), 1: (0,)},
    aten._native_batch_norm_legit_functional.default: {0: (0,)},
    aten.native_batch_norm_backward.default: {0: (0,), 1: (0,)},
}


@dataclass(frozen=True, slots=True)
class Pattern:
    """The arguments of an op with names in place of some sizes.

    Attributes:
        key: equal for arguments that differ in these sizes only.
        names: the names by size; they are negative numbers.
        others: sizes that have no name.
        batched: only the first size of a result may have a name.
    """

    key: object
    names: dict[int, int]
    others: set[int]
    batched: bool


_Result = tuple[torch.dtype, tuple[int, ...]] | None
_known: dict[object, tuple[tuple[_Result, ...], Structure]] = {}


def pattern_of(op: Op, arguments: tuple[object, ...]) -> Pattern | None:
    """Return the pattern of the arguments of an op; None where its types for other sizes do not follow.

    Args:
        arguments: those of a node's key, with layouts in place of values.
    """
    recorded = op.recorded
    if op.overload is not recorded:
        return None
    copied = _SOME_DIMS.get(recorded) or _BATCHED.get(recorded)
    pointwise = copied is None and torch.Tag.pointwise in getattr(recorded, "tags", ())
    if copied is None and not pointwise and recorded not in _COPYING:
        return None
    layouts = list(_layouts_in(arguments))
    if not layouts or any(0 in x.size for x in layouts) or not _is_row_major(layouts, pointwise):
        return None
    others = {0, 1, *_integers_in(arguments)}
    if copied is None:
        sizes = {n for x in layouts for n in x.size}
    else:
        sizes = set()
        for i, x in enumerate(arguments):
            dims = copied.get(i, ())
            for layout in _layouts_in(x):
                for d, n in enumerate(layout.size):
                    (sizes if d in dims else others).add(n)
                if dims and len(layout.size) != 4:
                    return None
    sizes -= others
    order = sorted(sizes | others if recorded in _COPYING else sizes)
    names = {n: -1 - i for i, n in enumerate(order) if n in sizes}
    key = op, torch.get_default_dtype(), tuple([_named(x, names) for x in arguments])
    return Pattern(key, names, others, recorded in _BATCHED)


def types_for(pattern: Pattern) -> tuple[Layouts, Structure] | None:
    """Return the layouts of the results, and how they nest, for arguments of a pattern that is known."""
    known = _known.get(pattern.key)
    if known is None:
        return None
    sizes = {name: n for n, name in pattern.names.items()}
    layouts: list[Layout | None] = []
    for result in known[0]:
        if result is None:
            layouts.append(None)
        else:
            size = tuple([sizes.get(n, n) for n in result[1]])
            layouts.append(in_rows(size, result[0]))
    return tuple(layouts), known[1]


def remember(pattern: Pattern, layouts: Layouts, structure: Structure) -> None:
    """Keep the types of the results for a pattern, where they follow from it."""
    names = pattern.names
    found = [x for x in layouts if x is not None]
    if not all(x.as_created for x in found):
        return
    if pattern.batched:
        if any(n in names for x in found for n in x.size[1:]):
            return
    elif not {n for x in found for n in x.size} <= pattern.others.union(names):
        return
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    results = tuple([None if x is None else (x.dtype, tuple([names.get(n, n) for n in x.size])) for x in layouts])
    _known[pattern.key] = results, structure


def _is_row_major(layouts: list[TensorType], pointwise: bool) -> bool:
    """Return whether results lie as created: torch gives them that too for tensors that differ in strides of 1 row."""
    if all(x.as_created for x in layouts):
        return True
    return pointwise and all(x.contiguous and x.size == layouts[0].size for x in layouts)


def _layouts_in(x: object) -> Iterator[TensorType]:
    if isinstance(x, TensorType):
        yield x
    elif type(x) is tuple:
        for e in x:
            yield from _layouts_in(e)


def _integers_in(x: object) -> Iterator[int]:
    if type(x) is int:
        yield x
    elif type(x) is tuple:
        for e in x:
            yield from _integers_in(e)


def _named(x: object, names: dict[int, int]) -> object:
    """Return an argument with names of sizes, in a form in which 1, 1.0 and True differ."""
    if isinstance(x, TensorType):
        return x.dtype, tuple([names.get(n, n) for n in x.size])
    if type(x) is tuple:
        return tuple([_named(e, names) for e in x])
    return type(x), x
