"""Single operators with operands that torch's operator database does not have.

Pointwise operators and reductions get shapes of their own: large and odd, of a high rank, without elements, broadcast,
with gaps in memory.  All others get a sample of the database laid out in another way.  Half of the operands hold NaN,
infinities, zeros of both signs, or the extreme integers of their type.
"""

from __future__ import annotations

import functools
import random
import re
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

import lazytpu
from tests.fuzz.checking import BOTH, compiling
from tests.fuzz.comparing import _TOLERANCE, _wide, close
from tests.fuzz.running import CPU

_LEFT_OUT = re.compile(
    # random, not initialised, not unique, not on a device
    r"bernoulli|cauchy|exponential$|geometric|log_normal|multinomial|normal$|uniform|rand|dropout|rrelu|fractional|empty"
    r"|resize|lowrank|eig|svd|qr|householder|lu|ldl|lstsq|pinv|matrix_rank|cond|sparse|_segment|ormqr|triangular_solve"
    # undefined: a shift by more than the bits, a conversion of what does not fit
    r"|shift|^(byte|char|short|int|long|half|bfloat16|cfloat|chalf|cdouble|to)$|histogram|^_"
)
_ORDERING = re.compile(r"max|min|sort|topk|kthvalue|median|mode$|clamp|unique|quantile")  # zeros are equal to these
_DTYPES = (torch.float32, torch.float32, torch.int64, torch.int32, torch.float64, torch.uint8, torch.int8, torch.bool)
_DTYPES += (torch.bfloat16, torch.float16, torch.complex64)
_SHAPES = (
    *((65_537,), (3, 40_001), (131, 127), (16_385, 3), (1, 99_991), (5, 7, 1_001), (33_000, 2)),
    *((1,) * 8, (2,) * 8, (3, 1, 2, 2, 8, 8, 8), (2, 1, 3, 1, 2, 3), (0,), (2, 0, 3), (0, 0), (), (1,), (17,), (3, 5)),
)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
Call = Callable[..., Any]


@functools.cache
def entries() -> dict[str, Any]:
    """The operators by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    named = {op.name + (f":{op.variant_test_name}" if op.variant_test_name else ""): op for op in op_db}
    return {name: op for name, op in sorted(named.items()) if op.dtypes and not _LEFT_OUT.search(name)}


def name_of(seed: int, only: str = "") -> str:
    """The operator of a seed: they take turns."""
    names = [name for name in entries() if not only or name in only.split(",")]
    return random.Random(seed // len(names)).sample(names, len(names))[seed % len(names)]


# --- operands -------------------------------------------------------------------------------------------------------


def specials(dtype: torch.dtype) -> list[float]:
    """The values at which operators have corners."""
    if dtype in _INTEGERS:
        info = torch.iinfo(dtype)
        return [info.min, info.max, info.max - 1, info.min + 1, 0, 1]
    if dtype.is_floating_point:
        large = 1e20 if dtype in (torch.float32, torch.float64, torch.bfloat16) else 3e4
        return [float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1.0, -1.0, 0.5, -0.5, large, -large]
    return [0.0, 1.0]


def values(rng: random.Random, shape: tuple[int, ...], dtype: torch.dtype, special: bool) -> torch.Tensor:
    """Numbers of a shape."""
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    if dtype in _INTEGERS:
        t = torch.randint(0 if dtype == torch.uint8 else -9, 10, shape, generator=generator).to(dtype)
    else:
        t = torch.randn(shape, generator=generator, dtype=torch.float64)
        t = torch.complex(t, t.flip(0) if t.dim() else t).to(dtype) if dtype.is_complex else t.to(dtype)
    if special and t.numel():
        corners = torch.tensor(specials(dtype), dtype=dtype)
        chosen = corners[torch.randint(0, len(corners), shape, generator=generator)]
        t = torch.where(torch.rand(shape, generator=generator) < rng.choice((0.02, 0.5)), chosen, t)
    return t


def laid_out(rng: random.Random, t: torch.Tensor) -> torch.Tensor:
    """The same values in another place: with gaps, in another order of dimensions, behind an offset."""
    kind = rng.randrange(5)
    if kind == 0 and t.dim() > 1:
        return t.transpose(0, -1).contiguous().transpose(0, -1)
    if kind == 1 and t.dim():
        wide = torch.stack([t, t], -1).flatten(-2)
        return wide[..., ::2]
    if kind == 2 and t.dim():
        return torch.cat([t[:1], t])[1 if t.shape[0] else 0 :]
    if kind == 3 and t.dim() == 4:
        return t.contiguous(memory_format=torch.channels_last)
    return t


def broadcast(rng: random.Random, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape that broadcasts to another."""
    kind = rng.randrange(4)
    if kind == 0:
        return shape
    if kind == 1:
        return shape[rng.randrange(len(shape) + 1) :]
    return tuple(n if rng.random() < 0.6 else 1 for n in shape)


def _twin(t: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """A tensor on a device in new memory, with the same strides and offset."""
    whole = torch.as_strided(t, (t.untyped_storage().nbytes() // t.element_size(),), (1,), 0)
    return whole.to(device, dtype, copy=True).as_strided(t.shape, t.stride(), t.storage_offset())


def _call_of(op: Any, rng: random.Random, dtype: torch.dtype, special: bool) -> tuple[Call, list[Any], dict[str, Any]]:
    """An operator, its operands and its keyword arguments."""
    from torch.testing._internal.opinfo.core import BinaryUfuncInfo, ReductionOpInfo, UnaryUfuncInfo

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        samples = list(islice(op.sample_inputs("cpu", dtype), 40))
    sample = rng.choice(samples)
    shape = rng.choice(_SHAPES)
    if isinstance(op, UnaryUfuncInfo) and not sample.args:
        return op.op, [laid_out(rng, values(rng, shape, dtype, special))], sample.kwargs
    if isinstance(op, BinaryUfuncInfo) and len(sample.args) == 1:
        pair = [laid_out(rng, values(rng, s, dtype, special)) for s in (shape, broadcast(rng, shape))]
        return op.op, pair if rng.random() < 0.5 or "alpha" in sample.kwargs else pair[::-1], sample.kwargs
    if isinstance(op, ReductionOpInfo) and not sample.args:
        x = laid_out(rng, values(rng, shape, dtype, special))
        kwargs: dict[str, Any] = {k: v for k, v in sample.kwargs.items() if k not in ("dim", "keepdim", "mask")}
        if shape and rng.random() < 0.8:
            dims = rng.sample(range(len(shape)), rng.randrange(1, 1 + min(3, len(shape))))
            kwargs["dim"] = dims if len(dims) > 1 and op.supports_multiple_dims else dims[0]
            kwargs["keepdim"] = rng.random() < 0.3
        return op.op, [x], kwargs

    def other(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or x.layout != torch.strided:
            return x
        if x.dtype == dtype and (dtype.is_floating_point or dtype.is_complex) and special and _bears_specials(op.name):
            x = torch.where(torch.rand(x.shape) < 0.1, values(rng, tuple(x.shape), dtype, True), x.detach())
        return laid_out(rng, x.detach())

    torch.manual_seed(rng.randrange(1 << 30))
    args = tree_map(other, [sample.input, *sample.args])
    return op.op, args, tree_map(other, sample.kwargs)


def _bears_specials(name: str) -> bool:
    """Whether infinities and NaN may stand in an operand: factorizations and the like say nothing of them."""
    return not re.search(
        r"linalg|cholesky|inverse|det|solve|matrix_exp|cov|corrcoef|fft|grid|interpolate|upsample|attention", name
    )


# --- checking -------------------------------------------------------------------------------------------------------


def check_op(name: str, seed: int, both: bool = False) -> list[str]:
    """What differs between the CPU and the device in the call that a seed draws.

    Args:
        both: call it twice, interpreted and compiled.
    """
    op, rng = entries()[name], random.Random(seed)
    dtypes = [d for d in _DTYPES if d in op.dtypes] or [next(iter(op.dtypes))]
    dtype, special = rng.choice(dtypes), rng.random() < 0.5
    if "polynomial" in name or (dtype in _INTEGERS and re.search(r"lcm|gcd|div|remainder|fmod", name)):
        special = False  # the degree says how long it takes; the least integer divided by -1 ends torch's own process
    call, args, kwargs = _call_of(op, rng, dtype, special)
    if name.startswith("normal:") or kwargs.get("dropout_p"):
        return []  # random
    grad = op.supports_autograd and dtype in (torch.float32, torch.float64) and not special and rng.random() < 0.5
    device = lazytpu.device()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            want = _results(call, args, kwargs, CPU, grad)
        except Exception:
            return []  # of errors there are tests of their own
        given = f"{_shown(args, kwargs)}{' gradient' if grad else ''}"
        found: list[str] = []
        for path in BOTH if both else [""]:
            try:
                with compiling(path):
                    got = _results(call, args, kwargs, device, grad)
                    got = [x.cpu() if isinstance(x, torch.Tensor) else x for x in got]
            except Exception as error:
                texts = [f"error\n  {type(error).__name__}: {str(error)[:400]}\n  not raised"]
            else:
                signed = not _ORDERING.search(name)
                texts = [*_differences(want, got, lambda: _results(call, args, kwargs, CPU, grad, wide=True), signed)]
            found += (f"{path} {given}: {text}".lstrip() for text in texts)
    return found


def _results(call: Call, args: Any, kwargs: Any, device: torch.device, grad: bool, wide: bool = False) -> list[Any]:
    memo: list[torch.Tensor] = []

    def given(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return {torch.float32: torch.float64}.get(x, x) if wide and isinstance(x, torch.dtype) else x
        dtype = x.dtype
        if wide and (x.is_floating_point() or x.is_complex()):
            dtype = torch.complex128 if x.is_complex() else torch.float64
        x = _twin(x, device, dtype).detach().requires_grad_(grad and x.is_floating_point())
        memo.append(x)
        return x

    args, kwargs = tree_map(given, (args, kwargs))
    results = tree_leaves(call(*args, **kwargs))
    if grad:
        able = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
        if able:
            sum(r.sum() for r in able if not r.is_complex()).backward()  # type: ignore[union-attr]
        results += [x.grad for x in memo if x.grad is not None]
    return [r.detach().resolve_conj().resolve_neg() if isinstance(r, torch.Tensor) else r for r in results]


def _differences(
    want: list[Any], got: list[Any], precise: Callable[[], list[Any]], signed: bool = True
) -> Iterator[str]:
    """What differs in results; also in signs of zeros, where these are ``signed``."""
    if len(want) != len(got):
        yield f"{len(got)} results, not {len(want)}"
        return
    for n, (w, g) in enumerate(zip(want, got, strict=True)):
        if not isinstance(w, torch.Tensor):
            if isinstance(w, (int, str, bool)) and w != g:
                yield f"value {g}, not {w}"
        elif (w.dtype, w.shape) != (g.dtype, g.shape):
            yield f"shape {g.dtype} {list(g.shape)}, not {w.dtype} {list(w.shape)}"
        elif not close(w, g) and not _each_near(w, g, precise, n):
            yield f"values {_first(w, g)}"
        elif (
            signed
            and w.dtype.is_floating_point
            and bool((zeros := _zeros_of_unlike_sign(w.double(), g.double())).any())
        ):
            yield f"signed zero in {int(zeros.sum())} of {w.numel()}, at {zeros.nonzero()[0].tolist()}"


def _zeros_of_unlike_sign(want: torch.Tensor, got: torch.Tensor) -> torch.Tensor:
    return (want == 0) & (got == 0) & (want.signbit() != got.signbit())


def _each_near(want: torch.Tensor, got: torch.Tensor, precise: Callable[[], list[Any]], n: int) -> bool:
    """Whether each element is about as far from the truth as the CPU's."""
    if want.dtype not in _TOLERANCE:
        return False
    try:
        truth = _wide(precise()[n])
    except Exception:  # not for float64
        truth = _wide(want)
    want, got, tolerance = _wide(want), _wide(got), _TOLERANCE[want.dtype]
    if truth.shape != want.shape:
        return False
    exact = (want == got) | (want.isnan() & got.isnan())
    scale = truth.abs().nan_to_num(0, 0, 0).clamp(1)
    near = (got - truth).abs() <= 8 * (want - truth).abs().nan_to_num(0, 0, 0) + 4 * tolerance * scale
    return bool((exact | near).all())


def _first(want: torch.Tensor, got: torch.Tensor) -> str:
    """The worst place, and what is there."""
    a, b = _wide(want), _wide(got)
    far = (a - b).abs()
    far = torch.where(a.isnan() != b.isnan(), torch.inf, far.nan_to_num(0, torch.inf))
    far = torch.where(a == b, 0.0, far)
    at = int(far.argmax())
    count = int((far > 0).sum())
    return f"{b.flatten()[at].item()}, not {a.flatten()[at].item()}, at {at} of {a.numel()}; {count} differ"


def _shown(args: Any, kwargs: Any) -> str:
    def text(x: Any) -> str:
        if isinstance(x, torch.Tensor):
            strides = "" if x.is_contiguous() else f"@{list(x.stride())}"
            small = f"={x.tolist()}" if x.numel() < 6 else ""
            return f"{str(x.dtype)[6:]}{list(x.shape)}{strides}{small}"
        if isinstance(x, (list, tuple)):
            return f"[{', '.join(map(text, x))}]"
        return repr(x)

    return ", ".join([*map(text, args), *(f"{k}={text(v)}" for k, v in kwargs.items())])
