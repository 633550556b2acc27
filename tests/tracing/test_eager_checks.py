"""What the CPU's kernels refuse and torch's meta kernels let pass is refused on the device, with the same words."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import lazytpu
from lazytpu.tracing.sample_tensors import dry_run
from tests.support.op_checks import error_of

Call = Callable[[Callable[..., torch.Tensor]], Any]

WRONG: dict[str, Call] = {
    "two dtypes": lambda x: torch.mm(x(3, 2), x(2, 3).double()),
    "two dtypes, many elements": lambda x: torch.mm(x(300, 200), x(200, 300).double()),
    "no kernel of this dtype": lambda x: F.gelu(x(3).long()),
    "no kernel of half precision": lambda x: torch.linalg.qr(x(2, 2).half()),
    "no kernel of half precision, many elements": lambda x: torch.linalg.qr(x(300, 300).bfloat16()),
    "no kernel of this dtype, very many elements": lambda x: F.gelu(x(600, 600).long()),
    "no kernel of this dtype, many elements": lambda x: F.gelu(x(300, 300).long()),
    "bitwise on floats": lambda x: x(3) & x(3),
    "order of complex numbers": lambda x: torch.sort(x(3).to(torch.complex64)),
    "a dimension out of range": lambda x: torch.softmax(x(3), 1),
    "nothing to reduce": lambda x: torch.max(x(0, 2), 0),
    "sizes that do not match": lambda x: x(3, 2).index_put_((x(2).long(),), x(3)),
    "a dtype of indices": lambda x: torch.index_fill(x(3, 2), 0, x(2).int(), 1),
    "no stride": lambda x: F.conv_transpose2d(x(1, 1, 4, 4), x(1, 1, 2, 2), stride=0),
    "a bias of another size": lambda x: F.conv2d(x(1, 1, 4, 4), x(1, 1, 2, 2), x(2)),
    "an interval the wrong way round": lambda x: x(3).uniform_(3, -1),
    "a probability": lambda x: x(3).bernoulli_(2),
    "a Python number": lambda x: F.softshrink(x(3), -1),
    "the kind of a Python number": lambda x: torch.add(x(3).bool(), x(3).bool(), alpha=1.5),
    "the last of a list": lambda x: torch._foreach_lerp([x(3)] * 2 + [x(3).int()], [x(3)] * 2 + [x(3).int()], 0.5),
    "a dtype of out": lambda x: torch.amax(x(3, 2), 0, out=x(2).double()),
    "a dtype of out, of an op that does not take zeros": lambda x: torch.linalg.cholesky(x(1, 1), out=x(1, 1).int()),
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
def test_it_raises_the_error_of_the_cpu(call: Call, device: torch.device) -> None:
    _, expected = error_of(call, torch.ones)
    _, error = error_of(call, lambda *size: torch.ones(*size, device=device))
    assert expected is not None
    assert (type(error), str(error)) == (type(expected), str(expected))


# A number that the dtype cannot hold, or that only just fits: what takes it, and tensors of which dtype.
TAKERS: dict[str, Callable[[torch.Tensor, Any], Any]] = {
    "fill_": lambda x, n: x.fill_(n),
    "fill_ one": lambda x, n: x[:1].clone().fill_(n),
    "full_like": lambda x, n: torch.full_like(x, n),
    "scalar_tensor": lambda x, n: torch.scalar_tensor(n, dtype=x.dtype, device=x.device),
    "setitem": lambda x, n: x.__setitem__(0, n),
    "masked_fill": lambda x, n: x.masked_fill(x > 0, n),
    "index_fill": lambda x, n: x.index_fill(0, x[:1].long(), n),
    "scatter": lambda x, n: x.scatter(0, x[:1].long(), n),
    "clamp": lambda x, n: x.clamp(max=n),
    "pad": lambda x, n: F.pad(x, (-1, 2), value=n),
    "threshold": lambda x, n: F.threshold(x, 1, n),
    "hardtanh": lambda x, n: F.hardtanh(x, n, 5),
    "addcmul": lambda x, n: torch.addcmul(x, x, x, value=n),
    "addmm": lambda x, n: torch.addmm(x[:, None], x[:, None], x[None, :1], beta=n),
    "addr": lambda x, n: torch.addr(x[:, None], x, x[:1], alpha=n),
    "add": lambda x, n: torch.add(x, x, alpha=n),
    "add_": lambda x, n: x.add_(x, alpha=n),
    "lerp": lambda x, n: torch.lerp(x, x, n),
    "linspace": lambda x, n: torch.linspace(0, n, 5, dtype=x.dtype, device=x.device),
}


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.float16, torch.float32, torch.bool], ids=str)
def test_numbers_that_a_dtype_cannot_hold(dtype: torch.dtype, device: torch.device) -> None:
    wrong = []
    for name, call in TAKERS.items():
        for number in (300, -1, -1.0, 2.5, 2**40, 1e39, float("inf"), float("nan"), 1j):
            want, expected = error_of(call, torch.tensor([0, 1, 2]).to(dtype), number)
            got, error = error_of(call, torch.tensor([0, 1, 2]).to(dtype).to(device), number)
            if (type(error), str(error)) != (type(expected), str(expected)):
                wrong.append(f"{name} of {number}: {error!r}, not {expected!r}")
            elif error is None and name != "setitem" and got.dtype != want.dtype:
                wrong.append(f"{name} of {number}: {got.dtype}, not {want.dtype}")
    lazytpu.mark_step()
    assert not wrong, "\n".join(wrong)


def test_division_by_the_number_zero(device: torch.device) -> None:
    wrong = []
    divide = {
        "//": lambda x, n: x // n,
        "%": lambda x, n: x % n,
        "fmod_": lambda x, n: x.fmod_(n),
        "div": lambda x, n: torch.div(x, n, rounding_mode="trunc"),
    }
    for dtype in (torch.int8, torch.int64, torch.bool, torch.float32):
        for (name, call), number, size in product(divide.items(), (0, 256, -1, False, 0.0), (0, 3)):
            x = torch.ones(size).to(dtype)
            _, expected = error_of(call, x.clone(), number)
            _, error = error_of(call, x.to(device), number)
            if (type(error), str(error)) != (type(expected), str(expected)):
                wrong.append(f"{dtype}[{size}] {name} {number}: {error!r}, not {expected!r}")
    lazytpu.mark_step()
    assert not wrong, "\n".join(wrong)


TAKEN: dict[str, Call] = {
    "bools raised to a bool in place": lambda x: x(3).bool().pow_(True),
    "complex numbers without NaN in place": lambda x: (x(3) * 1j).nan_to_num_(),
    "bools shifted": lambda x: x(3).bool() << 3,
    "bools filled with i": lambda x: x(3).bool().masked_fill(x(3) > 0, 1j),
    "log_softmax of no bools": lambda x: F.log_softmax(x(0).bool(), 0),
    "softmax of no bools": lambda x: F.softmax(x(0).bool(), 0),
}


@pytest.mark.parametrize("call", TAKEN.values(), ids=TAKEN)
def test_what_only_meta_kernels_refuse_is_taken(call: Call, device: torch.device) -> None:
    got = call(lambda *size: torch.ones(*size, device=device))
    torch.testing.assert_close(got.cpu(), call(torch.ones), rtol=0, atol=0)


LAST = 2**63 - 1
RANGES = [(0, 3, 0.5), (0, 3.7), (2**53, 2**53 + 5), (LAST - 4, LAST), (-LAST, LAST, 2**62), (LAST, LAST - 4, 2**60)]
RANGES += [(5, 0), (5, 0, -2), (0, 1, 0), (0, float("nan")), (0, 1e30), (True, 4), (1, 4, 1.0), (0, 1e19, 1e18)]


def test_the_length_of_a_range_is_that_of_the_cpu(device: torch.device) -> None:
    wrong = []
    for numbers, dtype in product(RANGES, (None, torch.int64, torch.int32, torch.float32)):
        expected, error = error_of(lambda: torch.arange(*numbers, dtype=dtype))  # noqa: B023
        got, refused = error_of(lambda: torch.arange(*numbers, dtype=dtype, device=device))  # noqa: B023
        same = (got is None) == (expected is None) and str(refused) == str(error)
        if not same or (got is not None and (got.shape, got.dtype) != (expected.shape, expected.dtype)):
            wrong.append(f"{numbers} {dtype}: {got if refused is None else refused}, not {expected} {error}")
    assert not wrong, "\n".join(wrong)


def test_contents_that_zeros_would_not_have_are_not_refused(device: torch.device) -> None:
    ones = torch.ones(3, dtype=torch.int64, device=device)
    eye = torch.eye(2, device=device)
    assert (ones // ones).tolist() == [1, 1, 1]
    assert torch.linalg.cholesky(eye).tolist() == eye.tolist()
    assert torch.multinomial(torch.ones(3, device=device), 2).shape == (2,)


def test_half_precision_is_not_refused_where_cuda_takes_it(device: torch.device) -> None:
    x = torch.full((1, 1, 2, 2, 2), 3.0, dtype=torch.float16)
    _, refused = error_of(F.avg_pool3d, x, 2)
    assert isinstance(refused, NotImplementedError)
    assert F.avg_pool3d(x.to(device), 2).tolist() == [[[[[3]]]]]
    with pytest.raises(RuntimeError, match="stride should not be zero"):  # what else is wrong is still said
        F.avg_pool3d(x.to(device), 2, stride=0)


def test_random_numbers_of_the_cpu_are_not_used_up(device: torch.device) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    torch.empty(5, 7, 11, device=device).normal_()
    torch.bernoulli(torch.full((5, 3), 0.5, device=device))
    lazytpu.mark_step()
    after = torch.get_rng_state()
    torch.manual_seed(3)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(after, before)


NUMBERS: dict[str, Callable[[Callable[..., torch.Tensor], Any, Any], Any]] = {
    "randint": lambda x, a, b: torch.randint(int(a), int(b), (3,), device=x(1).device),
    "randint_like": lambda x, a, b: torch.randint_like(x(3), int(b)),
    "random_": lambda x, a, b: x(3).random_(int(a), int(b)),
    "uniform_": lambda x, a, b: x(3).uniform_(a, b),
    "normal_": lambda x, a, b: x(3).normal_(a, b),
    "normal": lambda x, a, b: torch.normal(x(3), b),
    "bernoulli_": lambda x, a, b: x(3).bernoulli_(b / 10),
    "geometric_": lambda x, a, b: x(3).geometric_(b / 10),
    "exponential_": lambda x, a, b: x(3).exponential_(b),
    "softshrink": lambda x, a, b: F.softshrink(x(3), b),
    "smooth_l1_loss": lambda x, a, b: F.smooth_l1_loss(x(3), x(3), beta=b),
    "renorm": lambda x, a, b: torch.renorm(x(3, 2), 2, 0, b),
}


@pytest.mark.parametrize("call", NUMBERS.values(), ids=NUMBERS)
def test_a_number_that_changes_is_refused_as_well(call: Callable[..., Any], device: torch.device) -> None:
    def on_device(*size: int) -> torch.Tensor:
        return torch.ones(*size, device=device)

    for a, b in [(0, 3), (1, 4), (2, 3), (2, 5)]:
        call(on_device, float(a), float(b))
        lazytpu.mark_step()
    wrong = (float(-1), float(-2))
    _, expected = error_of(call, torch.ones, *wrong)
    _, error = error_of(call, on_device, *wrong)
    assert expected is not None
    assert (type(error), str(error)) == (type(expected), str(expected))
    lazytpu.mark_step()
    call(on_device, 3.0, 4.0)


def test_valid_probabilities_are_taken(device: torch.device) -> None:
    for rows, columns in ((8, 3), (3, 8), (9_000, 3), (1, 1), (0, 3), (5, 5)):
        x = torch.full((rows, columns), 1 / columns).to(device)
        for samples, replacement in ((1, False), (columns, False), (2 * columns, True)):
            assert torch.multinomial(x, samples, replacement).shape == (rows, samples)
    sampled = torch.distributions.Categorical(logits=torch.zeros(64, 4).to(device)).sample()
    assert sampled.shape == (64,) and int(sampled.max()) < 4


@pytest.mark.parametrize(
    "fail",
    [
        lambda x: dry_run(torch.ops.aten.mm.default, {}),
        lambda x: F.avg_pool2d(x, 3),  # the meta kernel takes it
        lambda x: F.softshrink(x, -1.0),
        lambda x: x @ x.view(1, 4),
    ],
)
def test_a_check_that_fails_holds_nothing_of_its_callers(
    fail: Callable[[torch.Tensor], Any], device: torch.device
) -> None:
    class Held:
        pass

    def fails() -> weakref.ref[Held]:
        held, x = Held(), torch.ones(1, 2, 2, dtype=torch.int64, device=device)
        with pytest.raises((RuntimeError, TypeError)):
            fail(x)
        return weakref.ref(held)

    gc.disable()
    try:
        assert fails()() is None, "what is held at a cut is computed"
    finally:
        gc.enable()


def test_variances_of_large_tensors_do_not_warn(device):
    x = torch.ones(100, 200, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for dim in (0, 1, None):
            x.std(dim), x.var(dim, correction=2), torch.var_mean(x, dim)
