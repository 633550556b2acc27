"""`lazytpu.config.check_bounds`: a position out of range raises at the next read, with the op and the line."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import lazytpu
from lazytpu.diagnosis import events
from lazytpu.errors import OutOfBoundsError, RefusedValueError
from lazytpu.observe import metrics
from lazytpu.runtime import index_checks

pytestmark = pytest.mark.usefixtures("checks")


def put(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    out = x.clone()
    out[i] = ROWS.to(x.device)  # not one number, with which torch 2.15 calls `index_fill_`
    return out


aten = torch.ops.aten
X = torch.arange(12.0).reshape(4, 3)
ROWS = torch.ones(2, 3)

# name: (what to do with X and two positions in dimension 0, the op, whether eager takes negative positions)
OPS: dict[str, tuple[Callable[[Any, Any], Any], str, bool]] = {
    "index": (lambda x, i: x[i], "index.Tensor", True),
    "index of the second of two": (lambda x, i: x[torch.zeros_like(i), i - 1], "index.Tensor", True),
    "index_put": (put, "index_put", True),
    "index_put accumulate": (
        lambda x, i: x.index_put((i,), x.new_ones(3), accumulate=True),
        "index_put",
        True,
    ),
    "gather": (lambda x, i: x.gather(0, i[:, None]), "gather", False),
    "index_select": (lambda x, i: x.index_select(0, i), "index_select", False),
    "take": (lambda x, i: x.take(i * 3), "take", True),
    "put_": (lambda x, i: x.clone().put_(i * 3, x.new_ones(2)), "put", True),
    "embedding": (lambda x, i: F.embedding(i, x), "embedding", False),
    "embedding_bag": (lambda x, i: F.embedding_bag(i[None], x), "_embedding_bag_forward_only", False),
    "scatter": (lambda x, i: x.scatter(0, i[:, None], 1.0), "scatter.value", False),
    "scatter of a tensor": (lambda x, i: x.scatter(0, i[:, None], x), "scatter.src", False),
    "scatter with": (
        lambda x, i: x.scatter(0, i[:, None], 2.0, reduce="multiply"),
        "scatter.value_reduce",
        False,
    ),
    "scatter_add": (lambda x, i: x.scatter_add(0, i[:, None], x), "scatter_add", False),
    "scatter_reduce": (lambda x, i: x.scatter_reduce(0, i[:, None], x, "amax"), "scatter_reduce.two", False),
    "index_add": (lambda x, i: x.index_add(0, i, ROWS.to(x.device)), "index_add", False),
    "index_copy": (lambda x, i: x.index_copy(0, i, ROWS.to(x.device)), "index_copy", False),
    "index_fill": (lambda x, i: x.index_fill(0, i, 5.0), "index_fill.int_Scalar", True),
    "index_reduce": (lambda x, i: x.index_reduce(0, i, ROWS.to(x.device), "amin"), "index_reduce", False),
    "nll_loss": (lambda x, i: F.nll_loss(x.t()[:2], i), "nll_loss_forward", False),
    "nll_loss2d": (lambda x, i: F.nll_loss(x[None, :, None, :2], i[None, None]), "nll_loss2d_forward", False),
    "cross_entropy": (lambda x, i: F.cross_entropy(x.t()[:2], i), "nll_loss_forward", False),
    "one_hot": (lambda x, i: F.one_hot(i, 4), "scatter.value", False),
    "multi_margin_loss": (lambda x, i: F.multi_margin_loss(x.t()[:2], i), "multi_margin_loss", False),
    "max_unpool2d": (
        lambda x, i: aten.max_unpool2d(x[None, None, :1, :2], i[None, None, None], [2, 2]),
        "max_unpool2d",
        False,
    ),
}


def outcome(run: Callable[[Any, Any], Any], device: Any, positions: list[int]) -> Any:
    """The result on ``device``, or the error."""
    try:
        return run(X.to(device), torch.tensor(positions, device=device)).cpu()
    except (IndexError, RuntimeError) as error:
        return error


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("name", OPS)
def test_raises_where_eager_does(device: torch.device, name: str) -> None:
    run, op, negative = OPS[name]
    for positions in ([0, 3], [0, 4], [0, -1], [0, -5], [9, 1]):
        want, got = outcome(run, "cpu", positions), outcome(run, device, positions)
        if isinstance(want, torch.Tensor):
            assert torch.equal(got, want), positions
        else:
            assert isinstance(got, OutOfBoundsError), f"{positions}: eager raises {want!r}"
            assert f"aten.{op}: index " in str(got)
            assert "test_index_checks.py:" in str(got)
        # only what this table says is refused, so that it cannot be passed by refusing everything
        taken = positions == [0, 3] or positions == [0, -1] and negative
        assert isinstance(want, Exception) is not taken, positions


def whole(*values: int, device: Any) -> torch.Tensor:
    return torch.tensor(values, device=device)


DIVISIONS: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "floor_divide": (lambda x, y: x // y, "floor_divide"),
    "floor_divide in place": (lambda x, y: x.clone().floor_divide_(y), "floor_divide"),
    "div rounded down": (lambda x, y: torch.div(x, y, rounding_mode="floor"), "div.Tensor_mode"),
    "div rounded to zero": (lambda x, y: torch.div(x, y, rounding_mode="trunc"), "div.Tensor_mode"),
    "remainder": (lambda x, y: x % y, "remainder.Tensor"),
    "remainder of a number": (lambda x, y: 7 % y, "remainder.Scalar_Tensor"),
    "fmod": (lambda x, y: torch.fmod(x, y), "fmod.Tensor"),
}


@pytest.mark.parametrize("name", DIVISIONS)
def test_division_by_zero_raises_where_eager_does(device: torch.device, name: str) -> None:
    run, op = DIVISIONS[name]
    x = whole(7, -7, device=device)
    assert run(x, whole(2, -2, device=device)).tolist() == run(x.cpu(), whole(2, -2, device="cpu")).tolist()
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        run(whole(7, -7, device="cpu"), whole(2, 0, device="cpu"))
    with pytest.raises(ZeroDivisionError, match=rf"aten.{op}: a whole .* zero\n +at +test_index_checks.py:"):
        run(x, whole(2, 0, device=device)).cpu()
    assert run(x.double(), whole(2, 0, device=device).double()).isfinite().tolist()[0]  # of floats it is no error


NAN = float("nan")
FEW = torch.tensor([0, 1, 2])

# name: (what to do with a tensor, values that eager takes, values that it refuses)
REFUSED: dict[str, tuple[Callable[[Any], Any], list[Any], list[list[Any]]]] = {
    "multinomial": (lambda x: x.multinomial(1), [0.0, 2.0], [[1.0, -1.0], [1.0, NAN], [0.0, 0.0]]),
    "multinomial with replacement": (lambda x: x.multinomial(1, True), [0.0, 2.0], [[1.0, math.inf], [0.0, 0.0]]),
    "bernoulli": (torch.bernoulli, [0.0, 1.0], [[0.5, 1.5], [0.5, NAN]]),
    "bernoulli_": (lambda x: torch.zeros_like(x).bernoulli_(x), [0.0, 1.0], [[0.5, -0.5]]),
    "normal": (lambda x: torch.normal(0.0, x), [0.0, 1.0], [[1.0, -1.0], [1.0, NAN]]),
    "normal of two": (lambda x: torch.normal(x, x), [0.0, 1.0], [[1.0, -1.0]]),
    "poisson": (torch.poisson, [0.0, 3.0], [[1.0, -1.0], [1.0, NAN]]),
    "binary_cross_entropy": (lambda x: F.binary_cross_entropy(x, x / 2), [0.0, 1.0], [[0.5, 1.5], [NAN, 0.0]]),
    "its target": (lambda x: F.binary_cross_entropy(x.clamp(0, 1), x), [0.0, 1.0], [[0.5, 1.5]]),
    "embedding_bag": (
        lambda x: F.embedding_bag(FEW.to(x.device), X.to(x.device), x.long()),
        [0, 3],
        [[1, 2], [0, 5], [0, 2, 1]],
    ),
    "embedding_bag of maxima": (
        lambda x: F.embedding_bag(FEW.to(x.device), X.to(x.device), x.long(), mode="max"),
        [0, 2, 1],
        [[1, 2]],
    ),
    "histc": (lambda x: x.histc(3), [1.0, 2.0], [[1.0, NAN], [1.0, math.inf]]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_values_that_eager_refuses(device: torch.device, name: str) -> None:
    run, taken, refused = REFUSED[name]
    run(torch.tensor(taken))
    run(torch.tensor(taken, device=device)).cpu()
    for values in refused:
        with pytest.raises(RuntimeError) as wanted:
            run(torch.tensor(values))
        y = run(torch.tensor(values, device=device))
        with pytest.raises((RefusedValueError, OutOfBoundsError), match=r"at +test_index_checks.py:") as raised:
            y.cpu()
        said = str(raised.value).splitlines()[0].split(": ", 1)[1]
        assert isinstance(raised.value, IndexError) or said.split("range")[0] in str(wanted.value)


def test_the_message(device: torch.device) -> None:
    x = torch.zeros(2, 5, device=device)
    y = x[:, torch.tensor([1, 7], device=device)]
    line = inspect.currentframe().f_lineno - 1
    with pytest.raises(IndexError) as raised:
        y.sum().item()
    assert str(raised.value).splitlines()[:3] == [
        "aten.index.Tensor: index 7 is out of bounds for dimension 1 with size 5",
        f"  at    test_index_checks.py:{line}",
        "  with  f32[2,5], i64[2]",
    ]


def test_the_line_is_that_of_the_run_not_of_the_compile(device: torch.device) -> None:
    def lines(bad: int) -> str:
        x, i = torch.zeros(3, device=device), torch.tensor([bad], device=device)
        lazytpu.mark_step()
        try:
            if bad == 0:
                return str(x.gather(0, i).cpu())
            x.neg()  # nobody wants it: another path, the same graph
            x.gather(0, i).cpu()
        except IndexError as error:
            return str(error).splitlines()[1]
        raise AssertionError

    lines(0)
    compiles = metrics.counter("compile")
    code, first = inspect.getsourcelines(lines)
    line = first + next(k for k, text in enumerate(code) if text.strip() == "x.gather(0, i).cpu()")
    assert lines(3) == f"  at    test_index_checks.py:{line}"
    assert metrics.counter("compile") == compiles


@pytest.mark.parametrize("read", [repr, torch.Tensor.item, torch.Tensor.cpu, bool, lambda _: lazytpu.wait()])
def test_any_read_raises_once_and_tensors_stay_usable(device: torch.device, read: Callable[[Any], Any]) -> None:
    x = torch.arange(3.0, device=device)
    other = torch.ones((), device=device) + 1
    y = x[torch.tensor([1, 5], device=device)]
    lazytpu.mark_step()  # is no read
    with pytest.raises(IndexError, match=r"index 5 is out of bounds"):
        read(other)
    read(other)
    assert other.item() == 2
    assert y[0].item() == 1
    assert (x + 1).tolist() == [1, 2, 3]


def test_an_op_whose_result_nobody_keeps(device: torch.device) -> None:
    x, i = torch.arange(3.0, device=device), torch.tensor([3], device=device)
    lazytpu.mark_step()
    x[i]
    lazytpu.mark_step()
    with pytest.raises(IndexError):
        lazytpu.wait()


def test_the_first_bad_op_of_several(device: torch.device) -> None:
    x, i = torch.arange(3.0, device=device), torch.tensor([7], device=device)
    good, bad, worse = x[i * 0], x.take(i), x.index_select(0, i + 1)
    with pytest.raises(IndexError, match=r"aten\.take: index 7"):
        (good + bad + worse).cpu()


def test_training_step(device: torch.device) -> None:
    torch.manual_seed(0)
    embedding = torch.nn.Embedding(4, 3).to(device)
    optimizer = torch.optim.SGD(embedding.parameters(), 0.1)

    def train(tokens: list[int]) -> torch.Tensor:
        optimizer.zero_grad()
        loss = embedding(torch.tensor(tokens, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        lazytpu.mark_step()
        return loss.detach()

    losses = [train([0, k % 4]) for k in range(20)]
    assert len(index_checks._reports) < 20  # those that are done and good are forgotten
    assert losses[16].item() < losses[0].item()  # of the same tokens
    compiles = metrics.counter("compile")
    bad = train([0, 4])
    with pytest.raises(IndexError, match=r"aten\.embedding: index 4(.|\n)*Embedding"):
        bad.item()
    assert train([1, 2]).isfinite().item()
    assert metrics.counter("compile") == compiles + 1  # that of isfinite


@pytest.mark.parametrize("places", [3, 4])
def test_masked_scatter_from_too_few(device: torch.device, places: int) -> None:
    mask = torch.arange(5) < places
    x, source = torch.zeros(5), torch.arange(3.0)
    if places == 3:
        assert x.to(device).masked_scatter(mask.to(device), source.to(device)).tolist() == [0, 1, 2, 0, 0]
        return
    with pytest.raises(RuntimeError):
        x.masked_scatter(mask, source)
    with pytest.raises(IndexError, match=r"masked_scatter: index 3 (.|\n)* size 3"):
        x.to(device).masked_scatter(mask.to(device), source.to(device)).cpu()


def test_ignored_classes_are_no_positions(device: torch.device) -> None:
    x, target = torch.randn(3, 4), torch.tensor([0, -100, 3])
    assert torch.allclose(F.cross_entropy(x.to(device), target.to(device)).cpu(), F.cross_entropy(x, target))
    target[0] = -1
    with pytest.raises(IndexError, match="index -1 "):
        F.cross_entropy(x.to(device), target.to(device)).item()


def test_a_changed_flag_compiles_again_and_says_so(device: torch.device) -> None:
    x, i = torch.arange(3.0, device=device), torch.tensor([1], device=device)
    lazytpu.mark_step()

    def run() -> None:
        y = x.index_select(0, i) * 3  # noqa: F841
        lazytpu.mark_step()

    run()
    compiles = metrics.counter("compile")
    lazytpu.config.check_bounds = False
    run()
    assert metrics.counter("compile") == compiles + 1
    assert events.compilations[-1].cause.text == "lazytpu.config.check_bounds was True and is False"
    for flag in (True, False, True):
        lazytpu.config.check_bounds = flag
        run()
    assert metrics.counter("compile") == compiles + 1


def test_off_there_is_nothing_in_the_graph(device: torch.device) -> None:
    lazytpu.config.check_bounds = False
    x, i = torch.arange(3.0, device=device), torch.tensor([0, 5], device=device)
    y = x[i] + 0.25
    lazytpu.mark_step()
    graph = events.compilations[-1].graph
    assert not graph.checked
    assert y.tolist() == [0.25, 2.25]
    assert not index_checks._reports


def test_replayed_steps_are_checked(device: torch.device) -> None:
    table = torch.arange(4.0, device=device)

    @lazytpu.compile
    def look_up(i: torch.Tensor) -> torch.Tensor:
        return table.index_select(0, i) + 1

    for k in range(4):
        assert look_up(torch.tensor([k], device=device)).item() == k + 1
    bad = look_up(torch.tensor([4], device=device))
    with pytest.raises(IndexError, match=r"index 4 (.|\n)*test_index_checks\.py"):
        bad.item()
    assert look_up(torch.tensor([2], device=device)).item() == 3


def test_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from lazytpu.config import _from_environment

    assert not _from_environment().check_bounds
    monkeypatch.setenv("LAZYTPU_CHECK_BOUNDS", "1")
    assert _from_environment().check_bounds
