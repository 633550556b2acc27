"""Conditions, loops and scans: one node each, equal to what torch does on the CPU, gradients included."""

from __future__ import annotations

import time

import pytest
import torch
from torch._higher_order_ops.associative_scan import associative_scan, associative_scan_op
from torch._higher_order_ops.map import map as torch_map
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop

import lazytpu
from tests.support.dynamo_marks import QUIET

pytestmark = [*QUIET, pytest.mark.usefixtures("fresh_dynamo")]  # or sizes that other tests varied are symbolic


def branch(x, y):
    return torch.cond(x.sum() > 0, lambda x, y: (x.sin() * y, x + y), lambda x, y: (x.cos(), x - y), (x, y))


def branch_with_weights(x, y):
    return torch.cond(x.sum() > 0, lambda x: x * y, lambda x: x - y, (x,))


def nested(x, y):
    def outer(x, y):
        return torch.cond(y.sum() > 0, lambda x: x.exp(), lambda x: x.tanh(), (x,))

    return torch.cond(x.sum() > 0, outer, lambda x, y: x * 1.0, (x, y))


def doubling(x, y):
    return while_loop(lambda i, x: i < 5, lambda i, x: (i + 1, x * y + i), (torch.zeros_like(x[0]).long(), x))


def until_large(x, y):
    return while_loop(lambda x: x.abs().sum() < 1000, lambda x: (x * 2,), (x,))


def recurrence(x, y):
    return scan(lambda h, v: ((h * y + v).tanh(), h + v), torch.ones_like(x), x[:, None] * torch.ones_like(x))


def backwards(x, y):
    return scan(lambda h, v: (h + v, h * v), torch.ones_like(y[0]), x, reverse=True)


def cumulative(x, y):
    return associative_scan(lambda a, b: a * b, x, 0, combine_mode="generic")


def mapped(x, y):
    return torch_map(lambda a, b: a.sin() * b, x, y)


CASES = [branch, branch_with_weights, nested, doubling, until_large, recurrence, backwards, cumulative, mapped]


def leaves(result):
    return [x for x in torch.utils._pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("case", CASES, ids=lambda f: f.__name__)
def test_forward(case, sign, device):
    x, y = torch.linspace(0.1, 1.3, 4) * sign, torch.linspace(0.5, 1.1, 4)
    for ours, theirs in zip(leaves(case(x.to(device), y.to(device))), leaves(case(x, y)), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("case", [c for c in CASES if c is not backwards], ids=lambda f: f.__name__)
def test_gradient(case, sign, device):
    def grads(where):
        x = (torch.linspace(0.1, 1.3, 4) * sign).to(where).requires_grad_()
        y = torch.linspace(0.5, 1.1, 4).to(where).requires_grad_()
        total = sum((t * t).sum() for t in leaves(case(x, y)) if t.is_floating_point())
        total.backward()
        return [t.grad for t in (x, y)]

    for ours, theirs in zip(grads(device), grads("cpu"), strict=True):
        assert (ours is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-5)


def test_a_condition_is_one_node_and_reads_nothing(device):
    x = torch.ones(3).to(device)
    branch(x, x)  # Dynamo looks at it the first time
    lazytpu.mark_step()
    lazytpu.metrics.reset()
    y = branch(x, x)[0]
    text = lazytpu.ir_text(y)
    assert text.count(" = cond(") == 1
    assert "aten.sin" in text  # both bodies are shown
    assert "aten.cos" in text
    assert lazytpu.metrics.counter("cut") == 0


def test_the_same_condition_does_not_compile_again(device):
    for k in range(4):
        branch(torch.full((3,), 1.0 - k).to(device), torch.ones(3).to(device))[0].cpu()
        if k == 1:
            lazytpu.metrics.reset()
    assert lazytpu.metrics.counter("compile") == 0


def test_a_thousand_turns_compile_in_seconds(device):
    start = time.perf_counter()
    xs = torch.randn(1000, 8)
    h, ys = scan(lambda h, v: ((0.9 * h + v).tanh(), h * v), torch.zeros(8).to(device), xs.to(device))
    i, z = while_loop(lambda i, z: i < 1000, lambda i, z: (i + 1, z * 0.999), (torch.tensor(0).to(device), h))
    lazytpu.mark_step(wait=True)
    assert time.perf_counter() - start < 60
    expected = torch.zeros(8)
    for v in xs:
        expected = (0.9 * expected + v).tanh()
    torch.testing.assert_close(h.cpu(), expected, rtol=1e-4, atol=1e-5)
    assert i.item() == 1000
    torch.testing.assert_close(z.cpu(), h.cpu() * 0.999**1000, rtol=1e-3, atol=1e-6)
    assert ys.shape == (1000, 8)


def test_branches_of_other_types_are_refused(device):
    with pytest.raises(Exception, match="(?i)same|mismatch|differ|other types"):
        torch.cond((torch.ones(()) > 0).to(device), lambda x: x * 2, lambda x: x.sum(), (torch.ones(3).to(device),))


def test_random_numbers_differ_from_turn_to_turn(device):
    def step(h, v):
        noise = torch.rand_like(v)
        return h + noise, noise.clone()

    torch.manual_seed(3)
    _, first = scan(step, torch.zeros(4).to(device), torch.zeros(20, 4).to(device))
    _, second = scan(step, torch.zeros(4).to(device), torch.zeros(20, 4).to(device))
    torch.manual_seed(3)
    _, again = scan(step, torch.zeros(4).to(device), torch.zeros(20, 4).to(device))
    first, second, again = first.cpu(), second.cpu(), again.cpu()
    assert len({round(v, 6) for v in first.flatten().tolist()}) > 75
    assert not torch.equal(first, second)
    assert torch.equal(first, again)


def test_an_in_place_op_on_what_the_body_made(device):
    x = torch.arange(3.0)

    def body(x):
        y = x.clone()
        y.add_(1)
        return y * 2

    ours = torch.cond(torch.tensor(True).to(device), body, lambda x: x.clone(), (x.to(device),))
    torch.testing.assert_close(ours.cpu(), (x + 1) * 2)


def test_no_turn_at_all(device):
    x = torch.ones(3).to(device)
    (out,) = while_loop(lambda x: x.sum() < 0, lambda x: (x * 2,), (x,))
    torch.testing.assert_close(out.cpu(), torch.ones(3))
    x = x.detach().requires_grad_()
    (out,) = while_loop(lambda x: x.sum() < 0, lambda x: (x * 2,), (x,))
    assert out.shape == (3,)


def test_the_associative_scan_as_one_node(device):
    x = torch.rand(7, 3) + 0.5
    (ours,) = associative_scan_op(lambda a, b: (a * b,), [x.to(device)], ())
    assert "associative_scan" in lazytpu.ir_text(ours)
    torch.testing.assert_close(ours.cpu(), x.cumprod(0))


def test_inside_a_compiled_function(device):
    def function(x):
        y = torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (x,))
        h, _ = scan(lambda h, v: (h * 0.5 + v, h.clone()), torch.zeros_like(y), y[:, None] * torch.ones_like(y))
        return h

    compiled = torch.compile(function, backend="lazytpu", fullgraph=True, options={"fullgraph": True})
    for x in (torch.ones(3), -torch.ones(3)):
        torch.testing.assert_close(compiled(x.to(device)).cpu(), function(x))


@pytest.mark.parametrize("values", [[[1.5, 2], [0, 4]], [[True, False], [True, True]], [[1, -2], [3, 1 << 40]]])
def test_a_literal_tensor_in_a_branch(values, device):
    def f(x):
        def positive(x):
            return x + torch.tensor(values, device=x.device)

        return torch.cond(x.sum() > 0, positive, lambda x: x * torch.tensor(values, device=x.device), (x,))

    for x in (torch.ones(2, 2, dtype=torch.float64), -torch.ones(2, 2, dtype=torch.float64)):
        for call in (f, lazytpu.jit(f)):
            assert torch.equal(call(x.to(device)).cpu(), f(x))


def test_a_large_tensor_in_a_body_is_refused(device):
    from lazytpu.errors import UnsupportedOpError
    from lazytpu.frontends.control_flow_kernels import body_of

    with pytest.raises(UnsupportedOpError, match="give it as an operand"):
        body_of(lambda x: x + torch.tensor([1.0] * 300).to(x.device), [((300,), torch.float32)])
    body = body_of(lambda x: x + torch.tensor(2.0).to(x.device), [((3,), torch.float32)])
    assert "aten.full([], 2.0" in repr(body)
