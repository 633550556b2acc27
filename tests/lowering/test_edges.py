"""Where arithmetic has edges: NaN, infinity, the sign of zero, overflow, ties, promotion.  Bit for bit the CPU's.

Each entry is a function of the device; everything it returns is compared, dtypes and signs of zeros included.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves

import lazytpu

nan, inf = math.nan, math.inf
EDGES = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, inf, -inf, nan, 1e6, -1e6, 1e-6, 41.0]
INTEGERS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
EVERY_DTYPE = "LAZYTPU_TEST_SAMPLES" in os.environ  # else without those that have another of their kind beside them
Case = Callable[[Any], Any]


def edges(device: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.tensor(EDGES, dtype=dtype).to(device)


def pairs(device: Any, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Every edge against every other."""
    a, b = zip(*product(EDGES, EDGES), strict=True)
    return torch.tensor(a, dtype=dtype).to(device), torch.tensor(b, dtype=dtype).to(device)


def limits(device: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The ends of an integer type, and what lies around zero, against each other; no zero on the right."""
    info = torch.iinfo(dtype)
    values = sorted({info.min, info.min + 1, max(info.min, -7), max(info.min, -1), 0, 1, 2, 7, info.max - 1, info.max})
    a, b = zip(*[(x, y) for x, y in product(values, values) if y and (x, y) != (info.min, -1)], strict=True)
    return torch.tensor(a, dtype=dtype).to(device), torch.tensor(b, dtype=dtype).to(device)


def cases() -> Iterator[tuple[str, Case]]:
    for dtype in FLOATS if EVERY_DTYPE else [torch.float32, torch.bfloat16, torch.float16]:
        for name in ("add", "sub", "mul", "div", "maximum", "minimum", "fmax", "fmin", "copysign", "eq", "lt", "ge"):
            yield f"{name} {dtype}", lambda d, n=name, t=dtype: getattr(torch, n)(*pairs(d, t))
        for name in ("fmod", "remainder", "floor_divide", "heaviside", "nextafter", "isclose"):
            if name != "nextafter" or dtype in (torch.float32, torch.float64):
                yield f"{name} {dtype}", lambda d, n=name, t=dtype: getattr(torch, n)(*pairs(d, t))
        for mode in ("trunc", "floor"):
            yield f"div {mode} {dtype}", lambda d, m=mode, t=dtype: torch.div(*pairs(d, t), rounding_mode=m)
        for name in ("neg", "abs", "sign", "signbit", "floor", "ceil", "trunc", "round", "frac", "relu", "isnan"):
            yield f"{name} {dtype}", lambda d, n=name, t=dtype: getattr(torch, n)(edges(d, t))
        for name in ("isinf", "isfinite", "nan_to_num", "sqrt", "square", "reciprocal", "sgn", "logical_not"):
            yield f"{name} {dtype}", lambda d, n=name, t=dtype: getattr(torch, n)(edges(d, t))
        for name in ("argmax", "argmin", "max", "min", "amax", "amin", "aminmax", "any", "all", "count_nonzero"):
            yield f"{name} {dtype}", lambda d, n=name, t=dtype: getattr(torch, n)(edges(d, t))
        for name in ("cummax", "cummin", "sort", "median", "nanmedian", "mode"):
            yield f"{name} {dtype}", lambda d, n=name, t=dtype: getattr(torch, n)(edges(d, t)[:12], 0)
        yield (
            f"clamp {dtype}",
            lambda d, t=dtype: (edges(d, t).clamp(-1, 1), edges(d, t).clamp(edges(d, t), edges(d, t))),
        )
        yield f"where {dtype}", lambda d, t=dtype: torch.where(edges(d, t) > 0, edges(d, t), -edges(d, t))
        yield f"to bool {dtype}", lambda d, t=dtype: edges(d, t).bool()
    for dtype in INTEGERS if EVERY_DTYPE else [torch.int8, torch.int64, torch.uint8]:
        for name in (
            "add",
            "sub",
            "mul",
            "floor_divide",
            "fmod",
            "remainder",
            "div",
            "gcd",
            "lcm",
            "maximum",
            "bitwise_xor",
        ):
            yield f"{name} {dtype}", lambda d, n=name, t=dtype: getattr(torch, n)(*limits(d, t))
        for mode in ("trunc", "floor"):
            yield f"div {mode} {dtype}", lambda d, m=mode, t=dtype: torch.div(*limits(d, t), rounding_mode=m)
        for name in ("sum", "prod", "cumsum", "cumprod", "square", "neg", "abs", "bitwise_not", "sign"):
            dim = [0] if name.startswith("cum") else []
            yield f"{name} {dtype}", lambda d, n=name, t=dtype, k=dim: getattr(torch, n)(limits(d, t)[0], *k)
        yield f"pow {dtype}", lambda d, t=dtype: limits(d, t)[0] ** 3
        yield (
            f"lcm {dtype}",
            lambda d, t=dtype: torch.lcm(torch.tensor([0, 6, 100]).to(t).to(d), torch.tensor([5, 4, 12]).to(d)),
        )
        yield f"shift {dtype}", lambda d, t=dtype: (limits(d, t)[0] << 1, limits(d, t)[0] >> 1)
        yield f"wraps {dtype}", lambda d, t=dtype: torch.tensor([300, -300, 70000, 1 << 40]).to(d).to(t)
        yield f"to float {dtype}", lambda d, t=dtype: [limits(d, t)[0].to(f) for f in FLOATS]
    yield from TIES.items()
    yield from HALVES.items()
    yield from SCALARS.items()
    yield from CASTS.items()
    yield from SPECIAL.items()


def tied(device: Any) -> torch.Tensor:
    return torch.tensor([[1.0, 3, 3, -2, 3, -2], [nan, 1, nan, inf, inf, -inf], [0.0, -0.0, 0, -0.0, 0, 0]]).to(device)


TIES: dict[str, Case] = {
    "ties of argmax": lambda d: (tied(d).argmax(1), tied(d).argmin(1), tied(d).argmax(), (tied(d) > 0).int().argmax(1)),
    "ties of max along a dim": lambda d: (tied(d).max(1), tied(d).min(1), tied(d).max(0)),
    "ties of cummax": lambda d: (tied(d).cummax(1), tied(d).cummin(1), tied(d).cummax(0)),
    "ties of a stable sort": lambda d: [tied(d).sort(dim=1, descending=k, stable=True) for k in (False, True)],
    "ties of median": lambda d: (tied(d).median(1), tied(d).nanmedian(1)),
    "ties of max_pool": lambda d: F.max_pool2d(tied(d).nan_to_num()[None], 2, 1, return_indices=True),
    "ties of rounding": lambda d: torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, 1e-9]).to(d).round(),
    "ties of rounding to decimals": lambda d: torch.tensor([0.25, 0.35, 2.675, -1.005]).to(d).round(decimals=1),
    "gradient of a tied max": lambda d: gradient(lambda x: x.max(), torch.tensor([1.0, 2, 2]).to(d)),
    "gradient of a tied amax": lambda d: gradient(lambda x: x.amax(), torch.tensor([1.0, 2, 2]).to(d)),
    "nansum over no named dimension": lambda d: torch.nansum(edges(d).view(2, 8), dim=[], keepdim=True),
    "gradient of a tied maximum": lambda d: gradient(lambda x: torch.maximum(x, x.flip(0)).sum(), edges(d)[:8]),
    "gradient of abs and relu at zero": lambda d: gradient(lambda x: (x.abs() + x.relu()).sum(), edges(d)[:8]),
    "gradient of clamp at its ends": lambda d: gradient(lambda x: x.clamp(-1, 1).sum(), edges(d)[:10]),
}


def few(device: Any, *size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Few different values, NaN among them where the dtype has it."""
    x = torch.randint(0, 5, size, generator=torch.Generator().manual_seed(0)).to(dtype)
    return (torch.where(x == 3, nan, x) if dtype.is_floating_point else x).to(device)


def convolution_gradients(device: Any) -> tuple[torch.Tensor, ...]:
    """Of the input and the weight in float16, which the CPU adds up tap by tap."""
    made = torch.Generator().manual_seed(0)
    sizes = (2, 4, 9, 9), (8, 4, 3, 3)
    x, w = (torch.randn(size, generator=made).to(device, torch.float16).requires_grad_() for size in sizes)
    return torch.autograd.grad(F.conv2d(x, w, padding=1), (x, w), ones(device, torch.float16, 1296).view(2, 8, 9, 9))


def gradient(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    return torch.autograd.grad(function(x), x)[0]


def ones(device: Any, dtype: torch.dtype, n: int = 4096) -> torch.Tensor:
    return torch.ones(n, dtype=dtype).to(device)


HALVES: dict[str, Case] = {
    # in bfloat16 a running sum of ones stays at 256, in float16 at 2048
    "triangles beyond all diagonals": lambda d: [
        f(n) for n in (2**40, -(2**40)) for f in (torch.ones(3, 2).to(d).tril, torch.ones(3, 2).to(d).triu)
    ],
    "half sums": lambda d: [(ones(d, t).sum(), ones(d, t).mean(), ones(d, t).norm()) for t in FLOATS],
    "half sums of small numbers": lambda d: [(ones(d, t) * 1e-3).sum() for t in FLOATS[2:]],
    "half products of matrices": lambda d: [ones(d, t).view(1, -1) @ ones(d, t).view(-1, 1) for t in FLOATS],
    "half losses": lambda d: [
        loss(edges(d, t)[:9], edges(d, t)[1:10]) for t in FLOATS for loss in (F.smooth_l1_loss, F.huber_loss)
    ],
    "half convolutions": convolution_gradients,
    "half overflow": lambda d: (ones(d, torch.float16, 2) * 60000 * 2, ones(d, torch.float16, 70000).sum()),
    "half softmax": lambda d: [F.softmax(ones(d, t, 1000) * 3, 0).sum() for t in FLOATS[2:]],
    "half rounding of each op": lambda d: [(ones(d, t, 3) + 1e-3) - 1 for t in FLOATS[2:]],
    "half times a float": lambda d: [ones(d, t, 3) * 0.1 * 10 for t in FLOATS[2:]],
    "float64 to half": lambda d: [
        torch.tensor([1.0009765625 + 1e-9, 65519.9, 65520.0, 1e-8]).double().to(d).to(t) for t in FLOATS[2:]
    ],
}


def operands(device: Any) -> list[torch.Tensor]:
    dtypes = [torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32]
    return [torch.tensor([1, 0, 1]).to(t).to(device) for t in (*dtypes, torch.float64, torch.complex64)]


OPERATORS = {f.__name__: f for f in (operator.add, operator.mul, operator.truediv, operator.sub, operator.pow)}
NUMBERS = (True, 2, -3, 2.5, inf, nan, 1j)


def attempt(function: Callable[[], torch.Tensor]) -> Any:
    """The result, or the type of the error."""
    try:
        return function()
    except (RuntimeError, TypeError) as error:
        return type(error).__name__


def defined(f: Any, x: torch.Tensor, number: Any) -> bool:
    """Whether eager's result says anything: not where its vectors make NaN of ``0 * inf``, or a kernel is missing."""
    if f is operator.pow:
        return number == number and not isinstance(number, (complex, bool)) and not x.dtype.is_complex
    if f is operator.sub and isinstance(number, bool):
        return not x.is_floating_point()
    if x.dtype.is_complex:
        return f is not operator.truediv and number != inf
    return f is not operator.truediv or not isinstance(number, complex)


SCALARS: dict[str, Case] = {
    **{
        f"{name} of {number}": lambda d, f=f, n=number: [
            [attempt(lambda x=x: f(x, n)), attempt(lambda x=x: f(n, x))] for x in operands(d) if defined(f, x, n)
        ]
        for name, f in OPERATORS.items()
        for number in NUMBERS
    },
    **{
        f"{name} of tensors of 0 dimensions": lambda d, f=f: [
            attempt(lambda x=x, y=y: f(x, y[0]))
            for x in operands(d)
            for y in operands(d)
            if f is operator.mul or f is operator.add or torch.bool not in (x.dtype, y.dtype)
            if f is not operator.pow or not (x.dtype.is_complex or y.dtype.is_complex)
        ]
        for name, f in OPERATORS.items()
        if f is not operator.truediv
    },
    "a 0-dim CPU tensor": lambda d: [x * torch.tensor(2.5, dtype=t) for x in operands(d)[:8] for t in FLOATS],
    "comparisons with numbers": lambda d: [(x > 0.5, x == 1, x <= True) for x in operands(d)[:8]],
    "a number no integer type holds": lambda d: [attempt(lambda x=x: x + 300) for x in operands(d)[1:4]],
    "quotients by one number": lambda d: [torch.arange(1.0, 100).to(d) / n for n in (3.0, 7.0, 41.0, 49.0)],
    "whole quotients by one number": lambda d: (torch.arange(100.0).to(d) / 41).floor(),
    "where of numbers": lambda d: [torch.where(edges(d) > 0, *xy) for xy in ((1, 2), (1.5, 2), (True, 2.5))],
    "results of sums": lambda d: [(x.sum(), attempt(x.mean), x.cumsum(0), x.prod()) for x in operands(d)[:8]],
    "full and arange": lambda d: (torch.full((2,), True, device=d), *[torch.arange(n, device=d) for n in (3, 3.0)]),
}

BYTES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.bool)
CASTS: dict[str, Case] = {
    "sums of floats as integers": lambda d: [
        getattr(torch, name)(torch.arange(-5.5, 6).to(d), 0, dtype=t)
        for name in ("sum", "prod", "cumsum", "cumprod")
        for t in BYTES[:4]
    ],
    "evenly spaced integers": lambda d: [
        f(low, high, 5, dtype=t, device=d)
        for f, low, high in ((torch.linspace, 0.9, 3.9), (torch.linspace, 7, -1), (torch.logspace, 0.9, 1.9))
        for t in BYTES[:4]
    ],
    "numbers that wrap looked for": lambda d: [
        torch.isin(torch.tensor([0, 1, 2]).to(t).to(d), n) for n in (2**40, 1.0, 0.5) for t in BYTES[:4]
    ],
    "numbers put into bools": lambda d: [
        call(torch.tensor([True, False]).to(d), torch.tensor([1]).to(d), n)
        for call in (
            lambda x, i, n: x.scatter(0, i, n),
            lambda x, i, n: x.scatter(0, i, n, reduce="add"),
            lambda x, i, n: x.index_fill(0, i, n),
            lambda x, i, n: x.masked_fill(~x, n),
        )
        for n in (2**40, 0.5, nan)
    ],
    "the middle of nothing": lambda d: [
        f(torch.zeros(0, dtype=t).to(d)) for f in (torch.median, torch.nanmedian) for t in (*BYTES, *FLOATS)
    ],
}

ZETA = [inf, -inf, nan, 1.0, 2.0, 3.5, 0.5, -1.0, 0.0, -0.5, -2.5, 20.0]
SPECIAL: dict[str, Case] = {
    "zeta": lambda d: torch.special.zeta(torch.tensor(ZETA, device=d)[:, None], torch.tensor(ZETA, device=d)),
    "zeta of numbers": lambda d: [torch.special.zeta(torch.tensor(ZETA, device=d), q) for q in (0.5, 1.0, -2.0, nan)],
    "pow of roots": lambda d: [edges(d, t) ** n for t in FLOATS for n in (2.5, 0.5, -0.5, -1, 0, 3.5)],
    "close ctc losses without labels": lambda d: [
        F.ctc_loss(torch.linspace(-3, -1, 36).view(4, 3, 3).to(d), torch.ones(3, 2).long().to(d), (4, 3, 2), few)
        for few in ((0, 0, 0), (0, 1, 0))
    ],
    "close ctc gradients of losses without end": lambda d: [
        gradient(
            lambda x, z=z: F.ctc_loss(x, torch.ones(3, 2).long().to(x.device), (4, 3, 2), (2, 2, 2), zero_infinity=z),
            torch.linspace(-3, -1, 36).view(4, 3, 3).to(d),
        )
        for z in (False, True)
    ],
    "bags that end before the indices do": lambda d: [
        F.embedding_bag(
            torch.tensor([0, 1, 1, 3, 2]).to(d),
            torch.arange(1.0, 5, dtype=t)[:, None].to(d),
            torch.tensor(offsets).to(d),
            mode=mode,
            include_last_offset=True,
            padding_idx=padding,
        )
        for offsets in ([0, 0, 3], [0, 2, 5])
        for mode in ("sum", "mean", "max")
        for padding in (None, 1)
        for t in (torch.float32, torch.float64, torch.bfloat16)
    ],
    "gradient of logit": lambda d: gradient(
        lambda x: x.logit().sum(), torch.tensor([0.0, -0.0, 1.0, 0.5, -0.5, 2.0], device=d)
    ),
    "determinants of no number": lambda d: torch.linalg.slogdet(torch.full((2, 2), nan, device=d))[:2],
    "close points far off a grid": lambda d: [
        F.grid_sample(
            torch.arange(20.0, device=d).view(1, 1, 4, 5),
            torch.tensor([[[[1e10, 0.3], [3e9, -3e9], [1e6, -0.3], [12345.6, -98765.4]]]], device=d),
            mode,
            padding,
            aligned,
        )
        for mode in ("bilinear", "bicubic", "nearest")
        for padding in ("border", "reflection")
        for aligned in (False, True)
    ],
    "products times zero": lambda d: [
        f(x, x, x, beta=beta, alpha=alpha)
        for x in (
            torch.full((2, 2), nan, device=d),
            torch.ones(2, 2, device=d) * inf,
            torch.ones(2, 2, device=d).half(),
        )
        for alpha, beta in ((0, 0), (0.0, 1), (1, 0.0), (2, 0))
        for f in (torch.addmm, lambda x, a, b, **kw: torch.addmv(x[0], a, b[0], **kw))
    ],
}
CASES = dict(cases())
# XLA's power function, and long sums in another order, are not the CPU's to the last bit.
CLOSE = ("zeta", "close", "pow of", "half softmax", "half sums", "sqrt")
# Which zero is the greater one is not said, and the CPU's vectors and scalars differ about it.
SIGNLESS = ("max", "min", "fmax", "fmin", "amax", "amin", "cummax", "cummin", "relu", "clamp", "ties")


def group_of(name: str) -> str:
    """The dtype or the kind of a case; the cases of a group are one test."""
    first, last = name.split()[0], name.split()[-1]
    return last if last.startswith("torch.") else first if first in ("ties", "gradient", "half", *OPERATORS) else "rest"


def problems(name: str, got: list[Any], want: list[Any]) -> Iterator[str]:
    """What of a case's results is not the CPU's."""
    if len(got) != len(want):
        yield f"{name}: {len(got)} results, not {len(want)}"
    for i, (g, w) in enumerate(zip(got, want, strict=False)):
        if not isinstance(w, torch.Tensor) or not isinstance(g, torch.Tensor):
            if isinstance(g, torch.Tensor) or g != w:
                yield f"{name}, result {i}: {g}, not {w}"
            continue
        g = g.cpu()
        if (g.dtype, g.shape) != (w.dtype, w.shape):
            yield f"{name}, result {i}: {g.dtype} {g.shape}, not {w.dtype} {w.shape}"
            continue
        if not torch.allclose(g, w, rtol=1e-6 if name.startswith(CLOSE) else 0, atol=0, equal_nan=True):
            yield f"{name}, result {i}: {g}, not {w}"
        elif w.is_floating_point() and not name.startswith(SIGNLESS):  # the sign of a NaN means nothing
            off = (g.signbit() != w.signbit()) & ~w.isnan()
            if off.any():
                yield f"{name}, result {i}: signs of {g[off]}, not {w[off]}"


def zeros(n: int) -> torch.Tensor:
    """Zeros of both signs."""
    return torch.where(few("cpu", n) > 1, 0.0, -0.0)


def in_order(x: torch.Tensor, dim: int, descending: bool) -> list[torch.Tensor]:
    return list(x.sort(dim=dim, descending=descending, stable=True))


SORTED: dict[str, tuple[torch.Tensor, int]] = {
    "rows": (few("cpu", 3, 40), 1),
    "columns": (few("cpu", 200, 2), 0),
    "float64": (few("cpu", 300, dtype=torch.float64), 0),
    "bool": (few("cpu", 17, dtype=torch.bool), 0),
    "a long row": (few("cpu", 70_000), 0),
    "many bytes": (few("cpu", 1 << 15, dtype=torch.uint8), 0),
    "int64": (few("cpu", 9, 30, dtype=torch.int64), 1),
    "zeros of both signs": (zeros(40), 0),
}


@pytest.mark.parametrize("descending", [False, True])
def test_equal_values_keep_their_order(device: torch.device, descending: bool) -> None:
    """Torch leaves the order open, so every sort has that of a stable one."""
    for name, (x, dim) in SORTED.items():
        ours, want, k = x.to(device), in_order(x, dim, descending), x.shape[dim] // 3
        first = [t.narrow(dim, 0, k) for t in want]
        for got in (ours.sort(dim, descending), ours.sort(dim=dim, descending=descending, stable=True)):
            assert not list(problems(name, list(got), want))
        assert torch.equal(ours.argsort(dim, descending).cpu(), want[1]), name
        if x.dtype is torch.bool:
            continue
        assert not list(problems(name, list(ours.topk(k, dim, largest=descending)), first))
        if not descending:
            assert not list(problems(name, list(ours.kthvalue(k, dim)), [t.select(dim, k - 1) for t in want]))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.int64], ids=str)
def test_mode_names_an_element_of_the_most_frequent_value(device: torch.device, dtype: torch.dtype) -> None:
    x = few("cpu", 5, 50, dtype=dtype).nan_to_num()
    values, indices = (t.cpu() for t in x.to(device).mode())
    assert torch.equal(values, x.mode().values)
    assert torch.equal(x.gather(1, indices[:, None])[:, 0], values)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("group", dict.fromkeys(map(group_of, CASES)))
def test_edges(device: torch.device, group: str) -> None:
    names = [name for name in CASES if group_of(name) == group]
    found = []
    for name in names:
        got = tree_leaves(CASES[name](device))
        lazytpu.mark_step()  # all results of a case by one graph
        found += problems(name, got, tree_leaves(CASES[name]("cpu")))
    assert not found, "\n".join(found)


def test_the_default_dtype_may_change(device):
    def made(where):
        results = [
            torch.ones(3, device=where),
            torch.full((2,), 1.5, device=where),
            torch.arange(3, device=where) + 1.5,
        ]
        return [*results, torch.arange(3, device=where) / 2, torch.rand(2, device=where), torch.eye(2, device=where)]

    pending = torch.ones(3, device=device)
    try:
        for dtype in (torch.float32, torch.float64, torch.float16, torch.float32):
            torch.set_default_dtype(dtype)
            for _ in range(2):
                ours, theirs = made(device), made("cpu")
                assert [x.dtype for x in ours] == [x.dtype for x in theirs]
                assert all(a.cpu().shape == b.shape for a, b in zip(ours, theirs, strict=True))
    finally:
        torch.set_default_dtype(torch.float32)
    assert pending.dtype == torch.float32 and pending.tolist() == [1, 1, 1]
