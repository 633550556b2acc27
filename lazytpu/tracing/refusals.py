"""What the CPU's kernels refuse and torch's meta kernels let pass: dtypes, ranks, values of attributes.

The CPU's own kernel is asked once for each kind of arguments, on stand-ins: tensors of the same sizes if these are
small, and of a few elements if not.  It may refuse their contents, so it is asked with three kinds of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from math import prod
from typing import Any

import torch

from lazytpu.ir.op_schema import ABSENT, Op, aten
from lazytpu.ir.tree import Number, Value
from lazytpu.ir.types import TensorType
from lazytpu.tensors.layout import Layout

Contents = Callable[[torch.Tensor], None]
PYTHON_NUMBER: dict[Any, Any] = {float: 2.0, int: 2, bool: True, complex: 2j}

_SMALL = 1 << 12  # elements of a tensor that is its own stand-in
_LARGE = 1 << 18  # no kernel is run on more elements than this
_MAX_KNOWN = 1 << 14

# Accelerators compute in more dtypes than these, for which the CPU has no kernels of many an op.
_JUDGED = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
_JUDGED |= {torch.float32, torch.float64, torch.complex64, torch.complex128}

# Kernels that follow their integers through memory without looking, or take more than the CPU's version of them.
_NOT_ASKED = {
    aten.linalg_lu_solve.default,
    aten.linalg_ldl_solve.default,
    aten.segment_reduce.default,
    aten._segment_reduce_backward.default,
    aten._embedding_bag_backward.default,
    aten._embedding_bag_dense_backward.default,
    aten._embedding_bag_per_sample_weights_backward.default,
}

# Kinds of arguments for which a kernel takes a number whatever its value.
_ANY_VALUE = {"number", "numbers", "tensor", "tensors"}

_accepted: dict[Any, None] = {}


def zeros(stand_in: torch.Tensor) -> None:
    """Leaves the zeros, which are indices into everything."""


def ones(stand_in: torch.Tensor) -> None:
    """Divisors, probabilities and pivots become ones, matrices identities."""
    with suppress(RuntimeError):  # memory that overlaps
        if stand_in.dim() > 1 and (stand_in.is_floating_point() or stand_in.is_complex()):
            stand_in.diagonal(dim1=-2, dim2=-1).fill_(1)
        else:
            stand_in.fill_(1)


def all_ones(stand_in: torch.Tensor) -> None:
    """Fill with ones: probabilities in every row, also where there are more rows than columns."""
    with suppress(RuntimeError):  # memory that overlaps
        stand_in.fill_(1)


CONTENTS: tuple[Contents, ...] = (zeros, ones, all_ones)


def is_of_another_device(error: Exception) -> bool:
    """Whether the CPU has no kernel of an op at all."""
    if not isinstance(error, NotImplementedError):
        return False
    return str(error).startswith("Could not run") or "privateuse1 backends" in str(error)


def refusal(op: Op, args: Any, kwargs: Any, results: Iterable[Layout | None]) -> Exception | None:
    """The error of the CPU's kernel for arguments of a node that the meta kernel took, or None.

    Args:
        op: what was called.
        args, kwargs: arguments of the node, `Value` for tensors.
        results: the layouts the meta kernel gives.
    """
    named = {**dict(zip([a.name for a in op.arguments], args, strict=False)), **kwargs}
    known = {a.name for a in op.overload._schema.arguments}
    named = {name: x for name, x in named.items() if name in known and x is not ABSENT}
    if any(type(x) is Number and op.arguments[op.positions[name]].kind not in _ANY_VALUE for name, x in named.items()):
        return None  # one that became an input because it changes: its value now is not known here
    layouts = list(_layouts_in(list(named.values())))
    judged = all(layout.dtype in _JUDGED for layout in layouts)
    if op.recorded in _NOT_ASKED or not (judged or any(0 in layout.size for layout in layouts)):
        return None
    numels = [prod(layout.size) for layout in (*layouts, *results) if layout is not None]
    sizes = {} if max(numels, default=0) <= _SMALL else _few(layouts)
    if not layouts and max(numels, default=0) > _SMALL:
        return None  # a factory: its sizes are attributes, which have no small stand-ins
    if op.name.startswith("aten._foreach_"):
        named = _one_of_each(named, sizes)
    key = op, tuple([(name, _key(x, sizes)) for name, x in named.items()])
    if key in _accepted:
        return None
    with torch.no_grad(), torch._C.DisableTorchFunction(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if sizes:
            error = _error_of_few(op, named, sizes)
            if error is not None:  # or is it that the attributes do not fit the smaller sizes?
                error = _error_on_cpu(op, named, {}) if sum(numels) <= _LARGE else None
        else:
            error = _error_on_cpu(op, named, {})
    if not judged and not isinstance(error, IndexError):  # which is about the sizes
        error = None
    if error is None:
        if len(_accepted) >= _MAX_KNOWN:
            _accepted.clear()
        _accepted[key] = None
    return error


def _layouts_in(x: Any) -> Iterable[TensorType]:
    if type(x) is Value:
        yield x.layout
    elif isinstance(x, (list, tuple)):
        for e in x:
            yield from _layouts_in(e)


def _few(layouts: Iterable[TensorType]) -> dict[int, int]:
    """Small sizes for the sizes of tensors: equal ones for equal, and larger ones for larger."""
    different = sorted({n for layout in layouts for n in layout.size if n > 1})
    return {n: i + 2 for i, n in enumerate(different)}


def _one_of_each(named: dict[str, Any], sizes: dict[int, int]) -> dict[str, Any]:
    """The arguments of an op that does the same to each element of its lists, with one element of each kind."""
    lists = {name: x for name, x in named.items() if isinstance(x, list)}
    if len({len(x) for x in lists.values()}) != 1:
        return named
    kinds = [tuple([_key(e, sizes) for e in elements]) for elements in zip(*lists.values(), strict=True)]
    firsts = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    return {**named, **{name: [x[i] for i in firsts] for name, x in lists.items()}}


def _key(x: Any, sizes: dict[int, int]) -> Any:
    if type(x) is Value:
        return tuple([sizes.get(n, n) for n in x.layout.size]), x.layout.dtype
    if type(x) is Number:
        return x.dtype
    if isinstance(x, (list, tuple)):
        return tuple([_key(e, sizes) for e in x])
    return type(x), repr(x)  # nan equals itself then, and -0.0 is not 0.0


def _error_of_few(op: Op, named: dict[str, Any], sizes: dict[int, int]) -> Exception | None:
    """The CPU's error for small stand-ins; none where these are no stand-ins as the meta kernel does not take them."""
    try:
        made = _call(op, named, sizes, "meta", zeros)
    except Exception:
        return None
    results = made if isinstance(made, (list, tuple)) else [made]
    if any(isinstance(t, torch.Tensor) and t.numel() > _SMALL for t in results):
        return None
    return _error_on_cpu(op, named, sizes)


def _error_on_cpu(op: Op, named: dict[str, Any], sizes: dict[int, int]) -> Exception | None:
    state = torch.get_rng_state() if op.random else None
    error: Exception | None = None
    try:
        for contents in CONTENTS:
            try:
                _call(op, named, sizes, "cpu", contents)
                return None
            except Exception as refused:
                error = refused.with_traceback(None)
                if is_of_another_device(error):
                    return None
    finally:
        if state is not None:
            torch.set_rng_state(state)
    return error


def _call(op: Op, named: dict[str, Any], sizes: dict[int, int], device: str, contents: Contents) -> Any:
    def stand_in(x: Any) -> Any:
        if type(x) is Value:
            tensor = torch.zeros([sizes.get(n, n) for n in x.layout.size], dtype=x.layout.dtype, device=device)
        elif type(x) is Number:
            if not isinstance(x.dtype, torch.dtype):
                return PYTHON_NUMBER[x.dtype]
            tensor = torch.zeros((), dtype=x.dtype, device=device)
        else:
            return [stand_in(e) for e in x] if isinstance(x, (list, tuple)) else x
        contents(tensor)
        return tensor

    given = {name: stand_in(x) for name, x in named.items()}
    if "device" in op.positions:
        given["device"] = torch.device(device)
    return op.overload(**given)
