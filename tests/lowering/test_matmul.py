"""``torch.matmul`` of batches is one node with one gradient node, and behaves as eager's expansions and ``bmm``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad

import lazytpu
from tests.support.both_devices import check_refused, ops_of

DEVICE = lazytpu.device()

SHAPES = {
    "matrices": ((4, 3), (3, 5)),
    "batches": ((2, 4, 3), (2, 3, 5)),
    "heads": ((2, 3, 4, 3), (2, 3, 3, 5)),
    "rows and a matrix": ((2, 4, 3), (3, 5)),
    "a matrix and batches": ((4, 3), (2, 3, 5)),
    "one batch": ((1, 1, 4, 3), (1, 1, 3, 5)),
    "batches that broadcast": ((2, 1, 4, 3), (1, 3, 3, 5)),
    "more dimensions on one side": ((3, 4, 3), (2, 3, 3, 5)),
    "rows and a vector": ((2, 4, 3), (3,)),
    "vectors": ((3,), (3,)),
    "no rows": ((2, 0, 3), (2, 3, 5)),
    "nothing to sum": ((2, 4, 0), (2, 0, 5)),
}
NEEDS = ["", "a", "b", "ab"]
LIES = {
    "in rows": lambda t: t,
    "matrices transposed": lambda t: t.mT.contiguous().mT if t.dim() > 1 else t,
    "heads beside places": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2) if t.dim() > 3 else t,
    "with gaps": lambda t: torch.stack([t, t], -1)[..., 0],
}


def made(shapes: Any, device: Any, *, needs: str = "ab", dtype: Any = torch.float64, lies: Any = torch.clone) -> Any:
    torch.manual_seed(0)
    pair = [lies(torch.randn(shape, dtype=dtype)) for shape in shapes]
    strides = [t.stride() for t in pair]
    pair = [torch.empty_strided(t.shape, t.stride(), dtype=dtype, device=device).copy_(t) for t in pair]
    assert [t.stride() for t in pair] == strides
    return [t.requires_grad_(name in needs) for name, t in zip("ab", pair, strict=True)]


def passes(pair: Any) -> list[Any]:
    """The result and the gradients, with how they lie in memory."""
    out = pair[0] @ pair[1]
    wanted = [t for t in pair if t.requires_grad]
    grads = torch.autograd.grad(out.square().sum(), wanted) if wanted else ()
    return [(t.detach().cpu(), t.stride(), t.requires_grad) for t in (out, *grads)]


@pytest.mark.parametrize("lies", LIES.values(), ids=LIES)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
def test_results_and_gradients(shapes: Any, lies: Any) -> None:
    for needs in NEEDS:
        ours, theirs = (passes(made(shapes, d, needs=needs, lies=lies)) for d in (DEVICE, "cpu"))
        for (a, *a_rest), (b, *b_rest) in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b)
            assert a_rest == b_rest, needs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64, torch.int64])
@pytest.mark.parametrize("name", ["heads", "rows and a matrix"])
def test_dtypes(name: str, dtype: torch.dtype) -> None:
    whole = dtype is torch.int64
    made_ones = [
        [t.mul(9).to(dtype).detach() for t in made(SHAPES[name], d)] if whole else made(SHAPES[name], d, dtype=dtype)
        for d in (DEVICE, "cpu")
    ]
    ours, theirs = [torch.matmul(*pair) for pair in made_ones]
    torch.testing.assert_close(ours.detach().cpu(), theirs.detach())
    if not whole:
        for out, pair in ((ours, made_ones[0]), (theirs, made_ones[1])):
            out.abs().sum().backward()
            assert all(t.grad is not None for t in pair)
        for x, y in zip(*made_ones, strict=True):
            torch.testing.assert_close(x.grad.cpu(), y.grad)


@pytest.mark.parametrize("name", ["batches", "heads", "rows and a matrix"])
def test_it_is_one_node_and_its_gradient_another(name: str) -> None:
    def on_the_device(needs: str) -> Any:
        pair = [t.detach().clone().requires_grad_(t.requires_grad) for t in made(SHAPES[name], DEVICE, needs=needs)]
        lazytpu.mark_step()
        return pair

    pair = on_the_device("ab")
    out = pair[0] @ pair[1]
    assert ops_of(out) == ["aten.matmul"]
    assert ops_of(*torch.autograd.grad(out, pair, torch.ones_like(out)))[-1] == "aten.matmul_backward"
    with torch.inference_mode():
        pair = on_the_device("")
        assert ops_of(pair[0] @ pair[1]) == ["aten.matmul"]


@pytest.mark.parametrize("name", ["heads", "rows and a matrix"])
def test_double_backward(name: str) -> None:
    def second(device: Any) -> list[torch.Tensor]:
        pair = made(SHAPES[name], device)
        first = torch.autograd.grad((pair[0] @ pair[1]).pow(3).sum(), pair, create_graph=True)
        return [g.cpu() for g in torch.autograd.grad(sum(g.square().sum() for g in first), pair)]

    for ours, theirs in zip(second(DEVICE), second("cpu"), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", ["matrices", "heads", "rows and a matrix"])
def test_forward_mode_and_transforms(name: str) -> None:
    def all_of(device: Any) -> list[torch.Tensor]:
        a, b = made(SHAPES[name], device, needs="")
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(a, torch.ones_like(a))
            tangent = forward_ad.unpack_dual(dual @ b).tangent.detach().cpu()

        def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (x @ y).sin().sum()

        each = torch.func.vmap(torch.func.grad(loss, argnums=1), (0, None))(a, b)
        jacobian = torch.func.jacfwd(loss, argnums=1)(a, b)
        return [tangent, each.cpu(), jacobian.cpu(), torch.func.hessian(loss)(a, b).cpu()]

    for ours, theirs in zip(all_of(DEVICE), all_of("cpu"), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("lies", LIES.values(), ids=LIES)
@pytest.mark.parametrize("needs", ["a", "b", "ab"])
@pytest.mark.parametrize("name", ["heads", "rows and a matrix"])
def test_an_operand_that_changes_before_the_backward_pass(name: str, needs: str, lies: Any) -> None:
    """Eager saves what ``bmm`` got, which is a copy of an operand that lies otherwise, and refuses accordingly."""

    def outcome(device: Any, changed: int) -> Any:
        pair = made(SHAPES[name], device, needs=needs, lies=lies)
        out = pair[0] @ pair[1]
        with torch.no_grad():
            pair[changed].add_(1)
        try:
            out.sum().backward()
        except RuntimeError as error:
            return str(error).partition(":")[0]
        return [t.grad.cpu() for t in pair if t.grad is not None]

    for changed in (0, 1):
        ours, theirs = outcome(DEVICE, changed), outcome("cpu", changed)
        if isinstance(theirs, str):
            assert ours == theirs
        else:
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    "shapes", [((4, 3), (4, 3)), ((2, 4, 3), (2, 4, 3)), ((2, 4, 3), (3, 3, 5)), ((2, 4, 3), (4, 5)), ((), (3,))]
)
@pytest.mark.parametrize("needs", ["", "ab"])
def test_errors_are_torch_s(shapes: Any, needs: str) -> None:
    check_refused(lambda device: torch.matmul(*made(shapes, device, needs=needs)))


@pytest.mark.parametrize("name", ["matrices", "heads", "rows and a matrix"])
def test_dtypes_that_differ_are_refused_as_on_the_cpu(name: str) -> None:
    def mixed(device: Any) -> torch.Tensor:
        a, b = made(SHAPES[name], device)
        return a.float() @ b

    check_refused(mixed)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_it_is_traced_and_counted() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    a, b = made(SHAPES["heads"], DEVICE)
    traced = torch.jit.trace(lambda x, y: x @ y, (a, b), check_trace=False)
    with FlopCounterMode(display=False) as counter:
        (a @ b).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 6 * 4 * 3 * 5
    torch.testing.assert_close(traced(a * 2, b), a * 2 @ b)


def test_autocast() -> None:
    a, b = made(SHAPES["heads"], DEVICE, dtype=torch.float32)
    with torch.autocast(lazytpu.device().type, torch.bfloat16):
        out = a @ b
    assert out.dtype is torch.bfloat16
    out.float().sum().backward()
    assert a.grad.dtype is b.grad.dtype is torch.float32


def test_the_check_on_the_cpu_knows_its_gradient() -> None:
    def step() -> torch.Tensor:
        pair = made(SHAPES["heads"], DEVICE)
        return sum(g.sum() for g in torch.autograd.grad((pair[0] @ pair[1]).square().sum(), pair))  # type: ignore[return-value]

    checked = lazytpu.debug.check(step)
    assert checked.ok and "matmul_backward" not in str(checked)
