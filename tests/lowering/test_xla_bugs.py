"""Programs that XLA gets wrong, with the right values; and a word where it gets them right by itself.

`docs/explanation/xla-bugs.md` has the programs in jax.  They are tried here as well: an XPASS line at the end of what
pytest prints names what the installed XLA has mended.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jax import lax

import lazytpu
from tests.support import xla_flags
from tests.support.dynamo_marks import QUIET

pytestmark = QUIET
device = lazytpu.device()
on_cpu = pytest.mark.skipif(lazytpu.platform() != "cpu", reason="about XLA on CPUs")
Tensor = torch.Tensor

POINTS = 40_000  # a product of so many rows was wrong from row 32,768 on
AFTER_A_PRODUCT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "norm": lambda r, x: (r @ x.T).norm(dim=0),
    "sum": lambda r, x: (r @ x.T).sum(0),
    "amax": lambda r, x: (r @ x.T).amax(0),
    "max": lambda r, x: (r @ x.T).max(0)[0],
    "mean of squares": lambda r, x: (r @ x.T).square().mean(0),
    "linear": lambda r, x: F.linear(x, r).T.sum(0),
    "addmm": lambda r, x: torch.addmm(r[:, :1], r, x.T).sum(0),
    "vmap": lambda r, x: torch.vmap(lambda p: r @ p)(x).T.sum(0),
    "other order": lambda r, x: (x @ r).sum(1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_reductions_of_products(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, r = (torch.rand(size, 3, dtype=dtype, generator=generator) for size in (POINTS, 3))
    ours = [f(r.to(device), x.to(device)) for f in AFTER_A_PRODUCT.values()]
    lazytpu.mark_step()
    for (name, f), got in zip(AFTER_A_PRODUCT.items(), ours, strict=True):
        torch.testing.assert_close(got.cpu(), f(r, x), msg=lambda m, name=name: f"{name}: {m}")


def test_reductions_of_products_of_high_rank() -> None:
    """Any of these ended the process."""
    u, v = (torch.rand(3, 1, 2, 2, 8, 8, 8) for _ in range(2))
    for dim in range(7):
        torch.testing.assert_close((u.to(device) * v.to(device)).sum(dim).cpu(), (u * v).sum(dim))


def test_extremes_of_long_rows_keep_nan() -> None:
    """They were lost in rows of more than 512 elements."""
    x = torch.zeros(7, 1001)
    x[:, 500] = torch.nan
    for function in (torch.amax, torch.amin):
        assert function(x.to(device), 1).isnan().cpu().all()
    assert x.to(device).max().isnan().item()


WRAPPED: dict[str, Callable[[Tensor], Tensor]] = {
    "abs": lambda x: x.abs() < 0,
    "quotient of abs": lambda x: x.abs() // 3,
    "product": lambda x: x * x < 0,
    "square": lambda x: x.square() // 3,
    "power": lambda x: x**2 < 0,
    "fourth power": lambda x: x**4 // 7,
    "abs of a list": lambda x: torch._foreach_abs([x])[0] < 0,
}


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64], ids=str)
def test_integers_that_wrap_around_are_negative(dtype: torch.dtype) -> None:
    info = torch.iinfo(dtype)
    x = torch.tensor([info.min, -3, 0, 5, math.isqrt(info.max) + 1], dtype=dtype)
    ours = [f(x.to(device)) for f in WRAPPED.values()]
    lazytpu.mark_step()
    for (name, f), got in zip(WRAPPED.items(), ours, strict=True):
        assert torch.equal(got.cpu(), f(x)), name


LARGE = [89.0, 130.0, 3e19, 3e38, -80.0, -130.0, -3e19, 1e-25, 2e-38, 0.0, -0.0, 1.5, float("inf"), float("nan")]
UNDONE: dict[str, Callable[[Tensor], Tensor]] = {
    "log(exp)": lambda x: x.exp().log(),
    "log2(exp)": lambda x: x.exp().log2(),
    "log10(exp)": lambda x: x.exp().log10(),
    "log(exp2)": lambda x: x.exp2().log(),
    "log2(exp2)": lambda x: x.exp2().log2(),
    "log1p(expm1)": lambda x: x.expm1().log1p(),
    "log(exp) of a view": lambda x: x.exp().view(2, -1).t().log().t().reshape(-1),
    "log(exp) in place": lambda x: x.clone().exp_().log_(),
    "exp * exp": lambda x: x.exp() * (-x).exp(),
    "exp / exp": lambda x: x.exp() / x.exp(),
    "x / exp * exp": lambda x: x / x.exp() * x.exp(),
    "exp ** 0.5": lambda x: x.exp() ** 0.5,
    "exp ** 0.3": lambda x: x.exp() ** 0.3,
    "sqrt(x * x)": lambda x: (x * x).sqrt(),
    "sqrt(square)": lambda x: x.square().sqrt(),
    "sqrt(x ** 2)": lambda x: (x**2).sqrt(),
    "(x * x) ** 0.5": lambda x: (x * x) ** 0.5,
    "(x ** 4) ** 0.25": lambda x: (x**4) ** 0.25,
    "(|x| ** 2.5) ** 0.4": lambda x: (x.abs() ** 2.5) ** 0.4,
    "log(|x| ** 2.5)": lambda x: (x.abs() ** 2.5).log(),
    "rsqrt(x * x)": lambda x: (x * x).rsqrt(),
    "sqrt(x) * sqrt(x)": lambda x: x.sqrt() * x.sqrt(),
    "x / sqrt(x)": lambda x: x / x.sqrt(),
    "1 / (1 / x)": lambda x: x.reciprocal().reciprocal(),
    "x / x / x": lambda x: x / x / x,
    "(1 / x) / x": lambda x: (1 / x) / x,
    "x / (x / y)": lambda x: x / (x / (x + 1)),
    "(x / y) / (x / y)": lambda x: (x / (x + 1)) / (x / (x + 2)),
    "x * s / s": lambda x: x * 1e30 / 1e30,
    "x * s * (1 / s)": lambda x: x * 1e30 * 1e-30,
    "x + 1 - 1": lambda x: x + 1 - 1,
    "1 - (1 - x)": lambda x: 1 - (1 - x),
    "x + s - s": lambda x: x + 3e38 - 3e38,
    "foreach": lambda x: torch._foreach_log(torch._foreach_exp([x]))[0],
    "norm of one": lambda x: torch.linalg.vector_norm(x[:, None], dim=1),
}


def undone(x: Tensor) -> list[Tensor]:
    x = x.requires_grad_()
    results = []
    for name, f in UNDONE.items():
        y = f(x)
        results.append(y.detach())
        if name not in ("foreach", "log(exp) in place"):
            results += torch.autograd.grad(y.sum(), x)
    return results


@pytest.fixture
def no_subnormals() -> Iterator[None]:
    """Results of eager are those of XLA on CPUs, which knows no numbers nearer to zero than the smallest normal one."""
    torch.set_flush_denormal(True)
    yield
    torch.set_flush_denormal(False)


@pytest.mark.usefixtures("no_subnormals")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_overflow_before_an_inverse(dtype: torch.dtype) -> None:
    large = torch.tensor(LARGE)
    x = (large.double() * large.double().abs() ** 7 if dtype is torch.float64 else large).to(dtype)
    ours = undone(x.to(device))
    lazytpu.mark_step()
    wanted = undone(x.clone())
    names = [n for n in UNDONE for _ in range(1 if n in ("foreach", "log(exp) in place") else 2)]
    for name, got, want in zip(names, ours, wanted, strict=True):
        torch.testing.assert_close(got.cpu(), want, equal_nan=True, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.usefixtures("fresh_dynamo", "no_subnormals")
@pytest.mark.parametrize("compiler", [lazytpu.compile, lazytpu.jit, lambda f: torch.compile(f, backend="lazytpu")])
def test_overflow_before_an_inverse_in_compiled_functions(compiler: Callable[..., Any]) -> None:
    def values(x: Tensor) -> list[Tensor]:
        return [f(x) for f in UNDONE.values()]

    x = torch.tensor(LARGE)
    ours = compiler(values)
    for _ in range(2):
        got = [y.cpu() for y in ours(x.to(device))]
        torch.testing.assert_close(got, values(x), equal_nan=True)


def _rows_moved(b: Any) -> Any:
    t = b.reshape(4, 6)
    return lax.dynamic_update_slice(t, t[:3], (1, 0))


def _moved_by_numpy(b: Any) -> Any:
    t = b.reshape(4, 6).copy()
    t[1:] = t[:3].copy()
    return t


_WRONG_IN_JAX: dict[str, tuple[Callable[..., Any], Callable[..., Any], list[tuple[int, ...]]]] = {
    "a product with its reduction": (
        lambda r, x: (r @ x.T).sum(0),
        lambda r, x: (r @ x.T).sum(0),
        [(3, 3), (POINTS, 3)],
    ),
    "a slice read through a reshape": (_rows_moved, _moved_by_numpy, [(24,)]),
    "a product less its maximum": (
        lambda x: x * 0.1 - (x * 0.1).max(-1, keepdims=True),
        lambda x: x * np.float32(0.1) - (x * np.float32(0.1)).max(-1, keepdims=True),
        [(40, 5)],
    ),
    "the sign of a square": (
        lambda x: jnp.square((x + 46341).astype(jnp.int32)) < 0,
        lambda x: np.square((x + 46341).astype(np.int32)) < 0,
        [(4,)],
    ),
    "a logarithm of an exponential": (lambda x: jnp.log(jnp.exp(x + 100)), lambda x: x + np.inf, [(4,)]),
}


@on_cpu
@pytest.mark.xfail(strict=False, reason="XLA's own: docs/explanation/xla-bugs.md", raises=AssertionError)
@pytest.mark.parametrize("name", _WRONG_IN_JAX)
def test_jax_by_itself(name: str) -> None:
    function, right, shapes = _WRONG_IN_JAX[name]
    given = [np.random.default_rng(i).random(shape, np.float32) for i, shape in enumerate(shapes)]
    np.testing.assert_allclose(jax.jit(function, compiler_options=xla_flags.AS_USERS)(*given), right(*given), rtol=1e-5)
