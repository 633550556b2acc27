"""Infer the types of an op's results, with torch's meta kernels.

Inference raises what eager torch raises.  Meta kernels let pass arguments that the CPU's kernels refuse, refuse some
that these take, and word errors in their own way, so the errors are borrowed from the CPU: its kernel is run on sample
tensors after a meta kernel took the arguments (`eager_checks.check`), and after one refused them (`_on_cpu`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)

from lazytpu.ir.op_schema import Arg, Op, OpOverload, aten
from lazytpu.ir.tree import Node, Structure, Value
from lazytpu.ir.types import is_dense
from lazytpu.observe import metrics
from lazytpu.tensors.layout import Layout, in_rows, root_layout
from lazytpu.tracing import eager_checks, size_patterns
from lazytpu.tracing.ranges import arange_on_meta
from lazytpu.tracing.sample_tensors import (
    call_with_samples,
    dry_run,
    is_of_another_device,
    named_arguments,
    written_names,
)

Layouts: TypeAlias = tuple[Layout | None, ...]


class Types(NamedTuple):
    """The types of the results of a node.

    Attributes:
        layouts: one for each result, None where torch gives none.
        structure: how the results nest, each an index into ``layouts``.
        natural: where an in-place op casts its results to the types of what it writes to, the types before the cast.
    """

    layouts: Layouts
    structure: Structure
    natural: tuple[Layout, ...] | None = None


_INFER = metrics.timer("infer")
_MAX_KNOWN = 4096
_known: dict[object, Types] = {}  # by op, types and attributes: equal layers of a model ask the same again

_NORMS = {
    aten.native_layer_norm.default,
    aten.native_group_norm.default,
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.no_stats,
    aten._batch_norm_with_update_functional.default,
}
_CONVOLUTIONS = {aten.convolution.default, aten.convolution_backward.default}  # strides depend on the device's kernel
_POW = aten.pow.Tensor_Scalar
_ARANGES = {aten.arange.default, aten.arange.start, aten.arange.start_step}


def infer(op: Op, node: Node) -> Types:
    """Return the types of the results of a node whose arguments are set.

    Raises:
        Whatever torch raises for arguments of these types.
    """
    signature = (op, torch.get_default_dtype(), *map(_type_of, node.key[1:]))
    known = _known.get(signature)
    if known is None:
        start = time.perf_counter()
        try:
            known = _infer_by_pattern(op, node, signature[2:])
        finally:
            _INFER.add(time.perf_counter() - start)
        if len(_known) >= _MAX_KNOWN:
            _known.clear()
        _known[signature] = known
    return known


def _type_of(key: object) -> object:
    """Return what types of results depend on in a part of a node's key: layouts in place of values."""
    if type(key) is Value:
        return key.layout
    return tuple([_type_of(k) for k in key]) if type(key) is tuple else key


def _infer_by_pattern(op: Op, node: Node, arguments: tuple[object, ...]) -> Types:
    """Return the types of results, from those for other sizes where they follow from these."""
    pattern = size_patterns.pattern_of(op, arguments)
    found = None if pattern is None else size_patterns.types_for(pattern)
    if found is not None:
        return Types(*found)
    types = _infer_new(op, named_arguments(op.recorded, node.args, node.kwargs))
    if pattern is not None and types.natural is None:
        size_patterns.remember(pattern, types.layouts, types.structure)
    return types


def _infer_new(op: Op, named: dict[str, Arg]) -> Types:
    rule = _RULES.get(op.overload)
    if rule is not None and (made := rule(**named)) is not None:
        return Types((made,), 0)
    named, places = _one_of_each(op, named)
    types = _infer(op, named)
    eager_checks.check(op, named, types.layouts)
    types = types._replace(layouts=eager_checks.with_eager_strides(op, named, types.layouts))
    if places is None:
        return types
    layouts, _, natural = types
    return Types(
        tuple([layouts[i] for i in places]), [*range(len(places))], natural and tuple([natural[i] for i in places])
    )


def _of_cat(tensors: list[Value], dim: object = 0) -> Layout | None:
    """Return the type of tensors joined along a dimension, None for others or where torch would refuse them.

    A cache that grows by a token asks this anew for each layer and token, and torch's meta kernel takes a millisecond.
    """
    if not tensors or type(dim) is not int or any(type(x) is not Value for x in tensors):
        return None
    first, total = tensors[0].layout, 0
    if not first.as_created or not -len(first.size) <= dim < len(first.size):
        return None
    dim %= len(first.size)
    for x in tensors:  # the first one decides how the result lies, where it is row-major
        found = x.layout
        alike = found.dtype is first.dtype and 0 not in found.size and len(found.size) == len(first.size)
        if not alike or found.size[:dim] != first.size[:dim] or found.size[dim + 1 :] != first.size[dim + 1 :]:
            return None
        total += found.size[dim]
    return in_rows((*first.size[:dim], total, *first.size[dim + 1 :]), first.dtype)


def _of_clone(self: Value, memory_format: object = None) -> Layout | None:
    """Return the type of a copy in rows."""
    return in_rows(self.layout.size, self.layout.dtype) if memory_format is torch.contiguous_format else None


def _of_mm(self: Value, mat2: Value) -> Layout | None:
    """Return the type of a product of matrices, however they lie."""
    a, b = self.layout, mat2.layout
    alike = len(a.size) == len(b.size) == 2 and a.dtype is b.dtype and a.dtype.is_floating_point
    if not alike or a.size[1] != b.size[0] or a.dtype.itemsize < 2 or 0 in (*a.size, *b.size):
        return None
    return in_rows((a.size[0], b.size[1]), a.dtype)


def _of_addmm(self: Value, mat1: Value, mat2: Value, **factors: object) -> Layout | None:
    """Return the type of a product of matrices and a sum, however they lie."""
    product, addend = _of_mm(mat1, mat2), self.layout
    if product is None or factors or addend.dtype is not product.dtype:
        return None
    return product if addend.size in (product.size, product.size[1:]) else None


_RULES: dict[OpOverload, Callable[..., Layout | None]] = {
    aten.addmm.default: _of_addmm,
    aten.cat.default: _of_cat,
    aten.clone.default: _of_clone,
    aten.mm.default: _of_mm,
}
"""For frequent ops the type of their result, from the arguments by name; None where torch is to be asked."""


def _one_of_each(op: Op, named: dict[str, Arg]) -> tuple[dict[str, Arg], list[int] | None]:
    """Keep one of the elements of equal types in the lists of an op that does the same to each element.

    Returns:
        The arguments, and which of the elements stands for each; None where all of them are kept.
    """
    lists = {name: x for name, x in named.items() if isinstance(x, list)}
    if not op.name.startswith("aten._foreach_") or len({len(x) for x in lists.values()}) != 1:
        return named, None
    kinds = [
        tuple([x.layout if type(x) is Value else x and x.dtype for x in elements])
        for elements in zip(*lists.values(), strict=True)
    ]
    first = {kind: kinds.index(kind) for kind in dict.fromkeys(kinds)}
    if len(first) == len(kinds):
        return named, None
    order = [*first]
    kept = {name: [x[i] for i in first.values()] for name, x in lists.items()}
    return {**named, **kept}, [order.index(kind) for kind in kinds]


def _infer(op: Op, named: Mapping[str, object]) -> Types:
    in_place = op.overload is not op.recorded
    if in_place:
        _check_in_place(op.overload, named)
    try:
        layouts, structure = _layouts(_on_meta(op.recorded, named))
    except Exception as error:
        results = _on_cpu(op.overload, named, error)
        if in_place or not _cpu_decides(op, named, error):
            raise error from None
        return Types(*_layouts(results))
    return Types(layouts, structure) if not in_place else _cast_to_targets(op.overload, named, layouts, structure)


def _check_in_place(overload: OpOverload, named: Mapping[str, object]) -> None:
    """Raise torch's errors about the target of an in-place op: broadcasting and casts, for example."""
    try:
        call_with_samples(overload, named)
    except NotImplementedError:
        return
    except Exception as error:
        _on_cpu(overload, named, error)  # which takes more than meta kernels that are written in Python


def _cast_to_targets(overload: OpOverload, named: Mapping[str, Arg], layouts: Layouts, structure: Structure) -> Types:
    """Return the types of what an in-place op writes to, and those of its results if they are other ones."""
    arguments = [named[name] for name in named if name in written_names(overload)]
    targets = [v.layout for x in arguments for v in (x if isinstance(x, list) else [x]) if v is not None]
    for natural, target in zip(layouts, targets, strict=False):  # meta kernels do not check this
        if natural is not None and not torch.can_cast(natural.dtype, target.dtype):
            cast = f"result type {natural.dtype} can't be cast to the desired output type {target.dtype}"
            error = RuntimeError(cast)
            _on_cpu(overload, named, error)
            raise error
    final = (*targets, *layouts[len(targets) :])
    same = all(n is None or (n.size, n.dtype) == (t.size, t.dtype) for n, t in zip(layouts, targets, strict=False))
    return Types(final, structure, None if same else layouts)  # type: ignore[arg-type]


def _on_cpu(overload: OpOverload, named: Mapping[str, Any], error: Exception) -> Any:
    """Return the results of the CPU's kernel where a meta kernel raised ``error``; raise what it raises."""
    try:
        return dry_run(overload, named)
    except Exception as eager:
        raise error if is_of_another_device(eager) else eager.with_traceback(None) from None


def _cpu_decides(op: Op, named: Mapping[str, object], error: Exception) -> bool:
    """Return whether an op is one to record where the CPU's kernel took arguments that its meta kernel refused."""
    if isinstance(error, NotImplementedError):
        return True  # there is no meta kernel
    dtypes = [x.layout.dtype for x in named.values() if type(x) is Value]
    narrows = not dtypes or not dtypes[0].is_complex and any(d.is_complex for d in dtypes)  # refused for some values
    return op.recorded.namespace == "aten" and not narrows


def _on_meta(overload: OpOverload, named: Mapping[str, object]) -> object:
    """Return meta tensors with the types of the results."""
    operands = [x.layout for x in named.values() if type(x) is Value]
    if overload in _CONVOLUTIONS and not all(x.as_created for x in operands):
        return _on_fake(overload, named)
    if overload is _POW and type(named["exponent"]) is bool and operands[0].dtype is torch.bool:
        return dry_run(overload, named)  # the meta kernel takes the exponent for an integer
    if overload in _ARANGES:
        return arange_on_meta(overload, named)
    try:
        results = call_with_samples(overload, named)
    except NotImplementedError as error:
        try:
            return _on_fake(overload, named)
        except (NotImplementedError, UnsupportedFakeTensorException, DynamicOutputShapeException):
            raise error from None
    if overload in _NORMS:
        return _as_the_cpu_keeps_statistics([x.dtype for x in operands], results)
    return results


def _on_fake(overload: OpOverload, named: Mapping[str, object]) -> object:
    """Return fake tensors of the CPU, for kernels whose results depend on the device."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        return call_with_samples(overload, named, "cpu")


def _as_the_cpu_keeps_statistics(operands: list[torch.dtype], results: Any) -> object:
    """Cast the statistics of a norm to the dtype of its parameters, or of its input where there are none.

    Meta kernels give them in float32.
    """
    if operands[0] not in (torch.bfloat16, torch.float16):
        return results
    dtype = operands[:2][-1]
    return [results[0], *[r.to(dtype) if r.is_floating_point() else r for r in results[1:]]]


def _layouts(results: object) -> tuple[Layouts, Structure]:
    layouts: list[Layout | None] = []

    def visit(x: object) -> Structure:
        if isinstance(x, list):
            return [visit(e) for e in x]
        if isinstance(x, tuple):
            return tuple([visit(e) for e in x])
        layouts.append(result_layout(x) if isinstance(x, torch.Tensor) else None)
        return len(layouts) - 1

    structure = visit(results)
    return tuple(layouts), structure


def result_layout(meta: torch.Tensor) -> Layout:
    """Return the layout of a new tensor with the sizes, strides and dtype of ``meta``."""
    size, stride = tuple(meta.shape), meta.stride()
    if not is_dense(size, stride):  # an expanded or gapped result has a dense storage of its own here
        with torch._C.DisableTorchFunction():
            stride = torch.empty_like(meta).stride()
    return root_layout(size, stride, meta.dtype)
