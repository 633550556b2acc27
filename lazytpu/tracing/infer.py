"""Types of the results of an op: torch's own meta kernels, asked once a node.

Torch's checks run here too, so a mistake in shapes or dtypes raises torch's message where the op is called.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
import torch.autograd.forward_ad as forward_ad
from torch._subclasses.fake_tensor import (
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.utils._pytree import tree_leaves

from lazytpu.ir.op_schema import Op, aten
from lazytpu.ir.tree import Node, Number, Value
from lazytpu.ir.types import is_dense
from lazytpu.observe import metrics
from lazytpu.tensors.layout import Layout, root_layout
from lazytpu.tracing import domains, refusals
from lazytpu.tracing.refusals import PYTHON_NUMBER

_INFER = metrics.timer("infer")

# What was inferred, by op, types and attributes: equal layers ask the same again.
_known: dict[Any, tuple[tuple[Layout | None, ...], Any, tuple[Layout, ...] | None]] = {}
_MAX_KNOWN = 4096
_LARGE = 1 << 18  # no kernel of the CPU is asked for types with more elements than this
_NORMS = {
    aten.native_layer_norm.default,
    aten.native_group_norm.default,
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.no_stats,
    aten._batch_norm_with_update_functional.default,
}
_CONVOLUTIONS = {aten.convolution.default, aten.convolution_backward.default}  # strides depend on the device's kernel
_WHERE, _POW = aten.where.self, aten.pow.Tensor_Scalar


def infer(op: Op, node: Node) -> tuple[tuple[Layout | None, ...], Any, tuple[Layout, ...] | None]:
    """Types of the results of a node whose arguments are set.

    Returns:
        The layouts of the results, how they nest, and, where an in-place op casts its results to the
        types of what it writes to, the types before the cast (else None).

    Raises:
        Whatever torch raises for arguments of these types.
    """
    signature = (op, torch.get_default_dtype(), *map(_type_of, node.key[1:]))
    known = _known.get(signature)
    if known is None:
        known = _infer_checked(op, node)
        if len(_known) >= _MAX_KNOWN:
            _known.clear()
        _known[signature] = known
    return known


def _type_of(key: Any) -> Any:
    """What the types of results depend on in a part of a node's key: layouts in place of values."""
    if type(key) is Value:
        return key.layout
    return tuple([_type_of(k) for k in key]) if type(key) is tuple else key


def _infer_checked(op: Op, node: Node) -> tuple[tuple[Layout | None, ...], Any, tuple[Layout, ...] | None]:
    kwargs = {k: v for k, v in node.kwargs.items() if k != "rng"}
    if "generator" in op.positions and op.arguments[op.positions["generator"]].kwarg_only:
        kwargs["generator"] = None  # some overloads have to be given one
    start = time.perf_counter()
    try:
        types = _infer_list(op, node, kwargs) or _infer(op, *_in_domain(op, node.args, kwargs))
    except Exception as error:
        types = _types_of_the_cpu(op, node, kwargs, error)
    finally:
        _INFER.add(time.perf_counter() - start)
    refused = refusals.refusal(op, node.args, kwargs, types[0])
    if refused is not None:
        raise refused
    return types


def _in_domain(op: Op, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments, with numbers that the op takes in the place of any number, where it does not take all."""
    name = op.recorded._overloadpacket.__name__

    def number(argument: str, x: Any) -> Any:
        return domains.stand_in(name, argument, PYTHON_NUMBER[x.dtype]) if _is_python_number(x) else x

    named = zip([a.name for a in op.arguments], args, strict=False)
    return [number(argument, x) for argument, x in named], {k: number(k, x) for k, x in kwargs.items()}


def _is_python_number(x: Any) -> bool:
    return type(x) is Number and not isinstance(x.dtype, torch.dtype)


def _infer_list(op: Op, node: Node, kwargs: dict[str, Any]) -> Any:
    """As `_infer`, for an op that does the same to each element of its lists: asks once for elements of equal types.

    None where that is no shorter, or where the lists do not go together, which is for torch to say.
    """
    lists = [x for x in (*node.args, *kwargs.values()) if isinstance(x, list)]
    n = len(lists[0]) if lists else 0
    if not op.name.startswith("aten._foreach_") or any(len(x) != n for x in lists):
        return None
    kinds = [tuple([e.layout if type(e) is Value else e and e.dtype for e in es]) for es in zip(*lists, strict=True)]
    distinct = [*dict.fromkeys(kinds)]
    if len(distinct) == n:
        return None
    firsts = [kinds.index(kind) for kind in distinct]
    of = [distinct.index(kind) for kind in kinds]

    def shorter(x: Any) -> Any:
        return [x[i] for i in firsts] if isinstance(x, list) else x

    keywords = {k: shorter(v) for k, v in kwargs.items()}
    layouts, structure, natural = _infer(op, [shorter(x) for x in node.args], keywords)
    if structure != [*range(len(firsts))]:
        return None
    return tuple([layouts[k] for k in of]), [*range(n)], natural and tuple([natural[k] for k in of])


def _infer(
    op: Op, args: Any, kwargs: dict[str, Any]
) -> tuple[tuple[Layout | None, ...], Any, tuple[Layout, ...] | None]:
    with torch.no_grad(), torch._C.DisableTorchFunction(), _outside_forward_ad():
        if op.overload is not op.recorded:
            _check_in_place(op, args, kwargs)
        results = _on_meta(op.recorded, args, kwargs, _factory_device(op))
        layouts, structure = _layouts(results)
        if op.overload is op.recorded:
            return layouts, structure, None
        written = _written_types(op, args, kwargs)
    for natural, target in zip(layouts, written, strict=False):  # meta kernels do not check this
        if natural is not None and not torch.can_cast(natural.dtype, target.dtype):
            raise RuntimeError(f"result type {natural.dtype} can't be cast to the desired output type {target.dtype}")
    if all(n is None or (n.size, n.dtype) == (w.size, w.dtype) for n, w in zip(layouts, written, strict=False)):
        return (*written, *layouts[len(written) :]), structure, None
    return (*written, *layouts[len(written) :]), structure, layouts  # type: ignore[return-value]


@contextmanager
def _outside_forward_ad() -> Iterator[None]:
    """Torch prints tensors to find the overload of a call, and asks for their tangents, which fails in a kernel."""
    level, forward_ad._current_level = forward_ad._current_level, -1
    try:
        yield
    finally:
        forward_ad._current_level = level


def _check_in_place(op: Op, args: Any, kwargs: Any) -> None:
    """Lets torch check the op that was called: broadcasting and casts of its target, for example."""
    named = {**dict(zip([a.name for a in op.arguments], args, strict=False)), **kwargs}
    known = {a.name for a in op.overload._schema.arguments}
    try:
        op.overload(**{name: _metas(x) for name, x in named.items() if name in known})
    except NotImplementedError:
        return
    except Exception:
        if _error_on_cpu(op, args, kwargs) is not None:  # meta kernels written in Python refuse more than the CPU
            raise


def _types_of_the_cpu(op: Op, node: Node, kwargs: dict[str, Any], error: Exception) -> Any:
    """What the CPU's kernel says where a meta kernel raised ``error``: those written in Python word things differently.

    They also refuse dtypes that the CPU takes.
    """
    eager = _error_on_cpu(op, node.args, kwargs)
    if eager is not None:
        raise error if refusals.is_of_another_device(eager) else eager from None
    args, keywords = _metas(node.args), {k: _metas(v) for k, v in kwargs.items()}
    given = [x for x in tree_leaves((args, keywords)) if isinstance(x, torch.Tensor)]
    narrowed = not given or given[0].is_complex() < any(x.is_complex() for x in given)  # refused for some values only
    foreign = op.recorded.namespace != "aten" or op.overload is not op.recorded
    if foreign or narrowed or sum(x.numel() for x in given) > _LARGE:
        raise error from None
    try:
        with torch.no_grad(), torch._C.DisableTorchFunction(), _outside_forward_ad():
            layouts, structure = _layouts(_on_zeros(op.recorded, args, keywords, _factory_device(op), error))
    except Exception:
        raise error from None
    return layouts, structure, None


def _error_on_cpu(op: Op, args: Any, kwargs: dict[str, Any]) -> Exception | None:
    """What the CPU's kernel raises for arguments of these types, if anything.

    Large operands that are only read take no memory.
    """
    written = {id(layout) for layout in _written_types(op, args, kwargs)}

    def sample(x: Any) -> Any:
        if type(x) is Value:
            if id(x.layout) in written or prod(x.layout.size) <= _LARGE:
                return torch.empty_strided(x.layout.size, x.layout.stride, dtype=x.layout.dtype).zero_()
            return torch.zeros((), dtype=x.layout.dtype).expand(x.layout.size)
        if type(x) is Number:
            return PYTHON_NUMBER.get(x.dtype, torch.zeros((), dtype=x.dtype) if isinstance(x.dtype, torch.dtype) else 0)
        return [sample(e) for e in x] if isinstance(x, (list, tuple)) else x

    named = {**dict(zip([a.name for a in op.arguments], args, strict=False)), **kwargs}
    known = {a.name for a in op.overload._schema.arguments}
    try:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            op.overload(**{name: sample(x) for name, x in named.items() if name in known})
    except Exception as eager:
        return eager.with_traceback(None)
    return None


def _written_types(op: Op, args: Any, kwargs: dict[str, Any]) -> tuple[Layout, ...]:
    written = []
    for argument in op.overload._schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            position = op.positions[argument.name]
            x = args[position] if position < len(args) else kwargs[argument.name]
            written += [v.layout for v in (x if isinstance(x, list) else [x]) if v is not None]
    return tuple(written)


def _factory_device(op: Op) -> dict[str, Any]:
    return {"device": torch.device("meta")} if "device" in op.positions else {}


def _metas(x: Any) -> Any:
    """The meta tensors and sample numbers that stand for the operands of a node."""
    if type(x) is Value:
        lay = x.layout
        return torch.empty_strided(lay.size, lay.stride, dtype=lay.dtype, device="meta")
    if type(x) is Number:
        if isinstance(x.dtype, torch.dtype):
            return torch.empty((), dtype=x.dtype, device="meta")
        return PYTHON_NUMBER[x.dtype]
    if isinstance(x, (list, tuple)):
        return [_metas(e) for e in x]
    return x


def _on_meta(overload: Any, args: Any, kwargs: Any, device: dict[str, Any]) -> Any:
    metas, keywords = _metas(args), {k: _metas(v) for k, v in kwargs.items()}
    if overload is _WHERE and metas[0].dtype is torch.uint8:
        metas[0] = metas[0].bool()  # which the CPU does, and the meta kernel refuses
    if overload is _POW and type(metas[1]) is bool and metas[0].dtype is torch.bool:
        return torch.empty_like(metas[0])  # the meta kernel takes the exponent for an integer
    try:
        if overload in _CONVOLUTIONS and any(_is_not_row_major(x) for x in metas[:3]):
            return _on_fake(overload, metas, keywords, device)
        results = overload(*metas, **keywords, **device)
        return results if overload not in _NORMS else _as_the_cpu_keeps_statistics(metas, results)
    except NotImplementedError as no_meta:
        try:
            return _on_fake(overload, metas, keywords, device)
        except (NotImplementedError, UnsupportedFakeTensorException, DynamicOutputShapeException):
            return _on_zeros(overload, metas, keywords, device, no_meta)
    except TypeError as error:
        if not str(error).startswith("cond must be a bool"):  # a check of the meta kernel's own that is ill-formed
            raise
        return _on_zeros(overload, metas, keywords, device, error)


def _is_not_row_major(x: Any) -> bool:
    """Whether strides are others than those of a new tensor; where sizes are 1, several say the same."""
    return isinstance(x, torch.Tensor) and x.stride() != torch.empty(x.shape, device="meta").stride()


def _as_the_cpu_keeps_statistics(metas: Any, results: Any) -> Any:
    """Meta kernels of norms always give statistics in float32; the CPU has them in the dtype of the
    parameters, or of the input where there are none."""
    if metas[0].dtype not in (torch.bfloat16, torch.float16):
        return results
    dtype = next((x.dtype for x in metas[1:] if isinstance(x, torch.Tensor)), metas[0].dtype)
    return [results[0], *[r.to(dtype) if r.is_floating_point() else r for r in results[1:]]]


def _on_fake(overload: Any, metas: Any, keywords: Any, device: dict[str, Any]) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True):
        fakes = _map(lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype), (metas, keywords))
        return overload(*fakes[0], **fakes[1], **({"device": "cpu"} if device else {}))


def _on_zeros(overload: Any, metas: Any, keywords: Any, device: dict[str, Any], no_meta: Exception) -> Any:
    """The op itself on CPU tensors of zeros: for the few ops without a meta kernel."""
    zeros = _map(lambda t: torch.zeros(t.shape, dtype=t.dtype), (metas, keywords))
    try:
        return overload(*zeros[0], **zeros[1], **({"device": "cpu"} if device else {}))
    except NotImplementedError:
        raise no_meta from None


def _map(f: Callable[[torch.Tensor], Any], x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return f(x)
    if isinstance(x, (list, tuple)):
        return type(x)(_map(f, e) for e in x)
    if isinstance(x, dict):
        return {k: _map(f, v) for k, v in x.items()}
    return x


def _layouts(results: Any) -> tuple[tuple[Layout | None, ...], Any]:
    layouts: list[Layout | None] = []

    def visit(x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return type(x)(visit(e) for e in x) if type(x) in (list, tuple) else tuple(visit(e) for e in x)
        layouts.append(result_layout(x) if isinstance(x, torch.Tensor) else None)
        return len(layouts) - 1

    structure = visit(results)
    return tuple(layouts), structure


def result_layout(meta: torch.Tensor) -> Layout:
    """The layout of a new tensor with the sizes, strides and dtype of ``meta``."""
    size, stride = tuple(meta.shape), meta.stride()
    if not is_dense(size, stride):  # an expanded or gapped result has a dense storage of its own here
        stride = torch.empty_like(meta).stride()
    return root_layout(size, stride, meta.dtype)
