"""Programs that XLA gets wrong, with the right values; and a word where it gets them right by itself.

`docs/explanation/xla-bugs.md` has the programs in jax.  They are tried here as well: an XPASS line at the end of what
pytest prints names what the installed XLA has mended.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from jax import lax

import lazytpu

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
    "a logarithm of an exponential": (lambda x: jnp.log(jnp.exp(x + 100)), lambda x: x + np.inf, [(4,)]),
}


@on_cpu
@pytest.mark.xfail(strict=False, reason="XLA's own: docs/explanation/xla-bugs.md", raises=AssertionError)
@pytest.mark.parametrize("name", _WRONG_IN_JAX)
def test_jax_by_itself(name: str) -> None:
    function, right, shapes = _WRONG_IN_JAX[name]
    given = [np.random.default_rng(i).random(shape, np.float32) for i, shape in enumerate(shapes)]
    np.testing.assert_allclose(jax.jit(function)(*given), right(*given), rtol=1e-5)
