"""Where rounding errors grow: no further off float64 than the CPU, or than the tolerance."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import scipy.special
import torch
import torch.nn.functional as F

import lazytpu

pytestmark = pytest.mark.usefixtures("optimized")


def test_attention_weights_add_up_to_one_for_large_scores(device: torch.device) -> None:
    """Or the two parts that cancel in the gradient of the scores would be off by as much."""
    torch.manual_seed(0)
    inputs = [9 * torch.randn(4, 4, n, 8, dtype=torch.float64) for n in (3, 6, 6)]
    weight = torch.randn(4, 4, 3, 8, dtype=torch.float64)

    def gradients(dtype: torch.dtype, on: torch.device | str) -> list[torch.Tensor]:
        qkv = [x.to(dtype).to(on).requires_grad_() for x in inputs]
        out = F.scaled_dot_product_attention(*qkv)
        return [g.cpu().double() for g in torch.autograd.grad(out, qkv, weight.to(dtype).to(on))]

    rounded = [x.float().double() for x in inputs]
    inputs[:] = rounded
    for got, want in zip(gradients(torch.float32, device), gradients(torch.float64, "cpu"), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-4, atol=1e-4)


@pytest.mark.parametrize("compiled", [False, True])
def test_attention_in_float64_is_as_exact_as_the_cpus(device: torch.device, compiled: bool) -> None:
    torch.manual_seed(0)
    inputs = [3 * torch.randn(2, 3, 7, 8, dtype=torch.float64) for _ in range(4)]

    def results(on: torch.device | str, attend: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        *qkv, weight = [x.to(on).requires_grad_() for x in inputs]
        out = attend(*qkv, is_causal=True)
        return [x.detach().cpu() for x in (out, *torch.autograd.grad(out, qkv, weight))]

    attend = F.scaled_dot_product_attention
    got = results(device, torch.compile(attend, backend="lazytpu") if compiled else attend)
    for ours, theirs in zip(got, results("cpu", attend), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_complex_logcumsumexp_is_the_cpus_to_the_bit(device: torch.device) -> None:
    x = 9 * torch.randn(4, 30, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(x.to(device).logcumsumexp(1).cpu(), x.logcumsumexp(1))


def test_gradient_of_logcumsumexp_is_as_far_off_as_the_cpus(device: torch.device) -> None:
    x = torch.tensor([1e4, -3.0, 1e4, 2.0, -1e4, 9.9e3])

    def gradient(on: torch.device | str) -> torch.Tensor:
        leaf = x.to(on).requires_grad_()
        out = leaf.logcumsumexp(0)
        (g,) = torch.autograd.grad(out, leaf, torch.tensor([1.0, -2, 0.5, 3, -1, 1]).to(on))
        return g.cpu()

    torch.testing.assert_close(gradient(device), gradient("cpu"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 12.0])
def test_matrix_exp_is_close_to_float64(device: torch.device, scale: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 5, 5) * scale
    want = torch.matrix_exp(x.double())
    off = (torch.matrix_exp(x.to(device)).cpu() - want).abs().amax((1, 2)) / want.abs().amax((1, 2))
    assert off.max() < 2e-5
    same = torch.matrix_exp(x.double().to(device)).cpu()
    torch.testing.assert_close(same / want.abs().max(), want / want.abs().max(), rtol=1e-12, atol=1e-13)


def test_lbfgs_in_float64_takes_the_steps_of_the_cpu_and_compiles_in_the_first_alone(device: torch.device) -> None:
    """In float32 its steps multiply rounding errors: the CPU does not follow itself when a batch is reordered."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()
    x, y = torch.randn(16, 6).double(), torch.randn(16, 3).double()
    ends, compiles = [], []
    for on in ("cpu", device):
        twin, a, b = copy.deepcopy(model).to(on), x.to(on), y.to(on)
        optimizer = torch.optim.LBFGS(twin.parameters(), max_iter=4, history_size=3)

        def closure(twin=twin, a=a, b=b, optimizer=optimizer) -> torch.Tensor:  # type: ignore[no-untyped-def]
            optimizer.zero_grad()
            loss = ((twin(a) - b) ** 2).mean()
            loss.backward()
            return loss

        for _ in range(4):
            optimizer.step(closure)
            lazytpu.mark_step()
            compiles.append(lazytpu.metrics.counter("compile"))
        ends.append([p.detach().cpu() for p in twin.parameters()])
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-9, atol=1e-9)
    assert compiles[-1] == compiles[-3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_bessel_functions_are_those_of_cephes(device: torch.device, dtype: torch.dtype) -> None:
    """Torch's are wrong by up to 2e-7 about 5.5, for they leave out a coefficient."""
    edges = [0.0, -0.0, 1e-6, 5.0, -5.0, math.inf, -math.inf, math.nan, 1e3]
    x = torch.cat([torch.linspace(-12, 40, 801, dtype=dtype), torch.tensor(edges, dtype=dtype)])
    names = ("j0", "j1", "y0", "y1")
    ours = [getattr(torch.special, f"bessel_{name}")(x.to(device)) for name in names]
    rtol, atol = (1e-12, 1e-12) if dtype is torch.float64 else (2e-4, 2e-6)
    for name, got in zip(names, ours, strict=True):
        # at infinity the CPU has NaN
        eager, exact = getattr(torch.special, f"bessel_{name}")(x), getattr(scipy.special, name)(x.double().numpy())
        want = torch.where(x.isfinite(), torch.from_numpy(exact).to(dtype), eager)
        torch.testing.assert_close(got.cpu(), want, rtol=rtol, atol=atol, equal_nan=True, msg=name)
        torch.testing.assert_close(got.cpu(), eager, rtol=2e-4, atol=1e-6, equal_nan=True, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_equal_elements_do_not_deviate(device: torch.device, dtype: torch.dtype) -> None:
    """Or ``x / std`` would not be caught where a feature is constant."""
    x = torch.tensor([0.1, -7.7, 1000.1], dtype=dtype).expand(101, 3).contiguous().to(device)
    for deviation in (x.std(0), x.T.contiguous().var(1), torch.var_mean(x, 0)[0], x[:, 1].std()):
        assert not deviation.cpu().any()


def test_variance_far_from_zero(device: torch.device) -> None:
    x = 1e6 + 10 * torch.randn(8, 1000, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(x.to(device).var(1).cpu().double(), x.double().var(1), rtol=1e-4, atol=0)
