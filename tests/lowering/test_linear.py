"""``F.linear`` is one node with one gradient node, and behaves as eager's transposition and ``addmm``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.nn.functional as F

import lazytpu
from tests.support.both_devices import check_refused, ops_of

DEVICE = lazytpu.device()

SHAPES = {
    "matrix": ((4, 3), (5, 3), (5,)),
    "without a bias": ((4, 3), (5, 3), None),
    "batch": ((2, 4, 3), (5, 3), (5,)),
    "batch without a bias": ((2, 2, 4, 3), (5, 3), None),
    "vector": ((3,), (5, 3), (5,)),
    "one output": ((4, 3), (3,), None),
    "no rows": ((0, 3), (5, 3), (5,)),
    "no columns": ((4, 0), (5, 0), (5,)),
    "a bias that broadcasts": ((4, 3), (5, 3), (1,)),
    "a bias of one number": ((4, 3), (5, 3), ()),
}


def made(shapes: Any, device: Any, *, needs: str = "xwb", dtype: Any = torch.float64, across: str = "") -> list[Any]:
    """Input, weight and bias with the same numbers on every device; those in ``across`` lie column by column."""
    torch.manual_seed(0)
    tensors: list[Any] = []
    for name, shape in zip("xwb", shapes, strict=True):
        if shape is None:
            tensors.append(None)
            continue
        tensor = torch.randn(shape, dtype=dtype)
        tensor = tensor.mT.contiguous().to(device).mT if name in across else tensor.to(device)
        tensors.append(tensor.requires_grad_(name in needs))
    return tensors


def passes(tensors: list[Any]) -> list[Any]:
    """The result and the gradients, with how they lie in memory."""
    out = F.linear(*tensors)
    wanted = [t for t in tensors if t is not None and t.requires_grad]
    grads = torch.autograd.grad(out.square().sum(), wanted) if wanted else ()
    return [(t.detach(), t.stride(), t.requires_grad) for t in (out, *grads)]


def assert_equal(ours: list[Any], theirs: list[Any], **tolerance: float) -> None:
    for (a, *a_rest), (b, *b_rest) in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.cpu(), b, **tolerance)  # type: ignore[arg-type]
        assert a_rest == b_rest


@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_results_and_gradients(shapes: Any) -> None:
    needs = ["", "x", "w", "b", "xw", "xb", "wb", "xwb"]
    ours = [passes(made(shapes, DEVICE, needs=n)) for n in needs]
    theirs = [passes(made(shapes, "cpu", needs=n)) for n in needs]
    for a, b in zip(ours, theirs, strict=True):
        assert_equal(a, b)


@pytest.mark.parametrize("across", ["x", "w", "xw"])
def test_operands_that_lie_across(across: str) -> None:
    shapes = SHAPES["matrix"]
    assert_equal(passes(made(shapes, DEVICE, across=across)), passes(made(shapes, "cpu", across=across)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64])
def test_dtypes(dtype: torch.dtype) -> None:
    ours, theirs = (made(SHAPES["batch"], d, dtype=dtype) for d in (DEVICE, "cpu"))
    a, b = F.linear(*ours), F.linear(*theirs)
    torch.testing.assert_close(a.detach().cpu(), b.detach())
    a.abs().sum().backward()
    b.abs().sum().backward()
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x.grad.cpu(), y.grad)


def test_it_is_one_node_and_its_gradient_another() -> None:
    x, w, b = made(SHAPES["matrix"], DEVICE)
    out = F.linear(x, w, b)
    assert ops_of(out) == ["aten.linear"]
    assert ops_of(*torch.autograd.grad(out, [x, w, b], torch.ones_like(out)))[-1] == "aten.linear_backward"
    with torch.no_grad():
        assert ops_of(F.linear(x.t().contiguous().t(), w, b))[-1] == "aten.addmm"
    with torch.inference_mode():
        assert ops_of(F.linear(*made(SHAPES["batch"], DEVICE, needs=""))) == ["aten.linear"]


def test_double_backward() -> None:
    def second(device: Any) -> list[torch.Tensor]:
        x, w, b = made(SHAPES["matrix"], device)
        first = torch.autograd.grad(F.linear(x, w, b).pow(3).sum(), [x, w, b], create_graph=True)
        return [g.cpu() for g in torch.autograd.grad(sum(g.square().sum() for g in first), [x, w, b])]

    for ours, theirs in zip(second(DEVICE), second("cpu"), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_forward_mode() -> None:
    def tangent(device: Any) -> torch.Tensor:
        x, w, b = made(SHAPES["matrix"], device)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            return forward_ad.unpack_dual(F.linear(dual, w, b)).tangent.detach().cpu()

    torch.testing.assert_close(tangent(DEVICE), tangent("cpu"))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_transforms() -> None:
    def all_of(device: Any) -> list[torch.Tensor]:
        x, w, b = made(SHAPES["matrix"], device, needs="")

        def loss(row: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            return F.linear(row, w, b).sin().sum()

        each = torch.func.vmap(torch.func.grad(loss, argnums=1), (0, None))(x, w)
        jacobian = torch.func.jacfwd(loss, argnums=1)(x, w)
        return [each.cpu(), jacobian.cpu(), torch.func.hessian(loss)(x, w).cpu()]

    for ours, theirs in zip(all_of(DEVICE), all_of("cpu"), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("needs", ["w", "xw"])
def test_a_weight_that_changes_before_the_backward_pass(needs: str) -> None:
    """Eager saves the weight only where the input has a gradient, and refuses only then."""

    def outcome(device: Any) -> Any:
        x, w, b = made(SHAPES["matrix"], device, needs=needs)
        out = F.linear(x, w, b)
        with torch.no_grad():
            w.add_(1)
        try:
            out.sum().backward()
        except RuntimeError as error:
            return str(error).partition(":")[0]
        return w.grad.cpu()

    ours, theirs = outcome(DEVICE), outcome("cpu")
    if isinstance(theirs, str):
        assert ours == theirs
    else:
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("shapes", [((4, 3), (5, 2), (5,)), ((2, 4, 3), (5, 2), None), ((4, 3), (5, 3), (4,))])
@pytest.mark.parametrize("needs", ["", "xwb"])
def test_errors_are_torch_s(shapes: Any, needs: str) -> None:
    check_refused(lambda device: F.linear(*made(shapes, device, needs=needs)))


def test_dtypes_that_differ_are_refused() -> None:
    x, w, b = made(SHAPES["matrix"], DEVICE)
    with pytest.raises(RuntimeError, match="dtype"):
        F.linear(x.float(), w, b)


def test_the_check_on_the_cpu_knows_its_gradient() -> None:
    def step() -> torch.Tensor:
        x, w, b = made(SHAPES["batch"], DEVICE)
        return sum(g.sum() for g in torch.autograd.grad(F.linear(x, w, b).square().sum(), [x, w, b]))  # type: ignore[return-value]

    checked = lazytpu.debug.check(step)
    assert checked.ok and "linear_backward" not in str(checked)
