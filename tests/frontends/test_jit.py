"""lazytpu.jit: a function of tensors compiled whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lazytpu
from lazytpu.errors import GraphBreakError, LazyTPUError, UnsupportedOpError
from tests.support.dynamo_marks import FRESH

pytestmark = FRESH


@pytest.mark.parametrize("where", ["tpu", "cpu"])
def test_values_and_gradients(where):
    def function(x, w):
        return {"loss": ((x @ w).tanh() ** 2).mean(), "n": x.shape[0]}

    def run(call, where):
        torch.manual_seed(0)
        x, w = torch.randn(4, 3).to(where), torch.randn(3, 2).to(where).requires_grad_()
        out = call(x, w)
        out["loss"].backward()
        assert out["n"] == 4
        assert out["loss"].device.type == where
        return out["loss"].detach().cpu(), w.grad.cpu()

    torch.testing.assert_close(run(lazytpu.jit(function), where), run(function, "cpu"))


def test_a_float_is_an_input(device):
    @lazytpu.jit
    def step(w, g, lr, *, decay=0.0):
        return w - lr * (g + decay * w)

    w, g = torch.ones(4), torch.arange(4.0)
    for k in range(6):
        ours = step(w.to(device), g.to(device), 0.1 * k, decay=0.01 * k)
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.cpu(), w - 0.1 * k * (g + 0.01 * k * w))
    assert lazytpu.metrics.counter("compile") + lazytpu.metrics.counter("disk_hit") == 1


def test_other_constants_and_static_floats_are_part_of_the_program(device):
    @lazytpu.jit(static="scale")
    def grow(x, times, scale):
        for _ in range(times):
            x = x * scale + int(scale * 2)
        return x

    def plain(x, times, scale):
        for _ in range(times):
            x = x * scale + int(scale * 2)
        return x

    x = torch.ones(3)
    for times, scale in ((1, 2.0), (3, 2.0), (3, 0.5)):
        torch.testing.assert_close(grow(x.to(device), times, scale).cpu(), plain(x, times, scale))


def test_more_constants_than_torch_allows_for(device):
    @lazytpu.jit
    def plus(x, n):
        return x + n

    for n in range(12):
        assert plus(torch.zeros(()).to(device), n).item() == n


def test_methods_modules_and_buffers(device):
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.register_buffer("calls", torch.zeros(()))

        @lazytpu.jit
        def forward(self, x):
            """Doc."""
            self.calls += 1
            return self.linear(x)

    model = Counter().to(device)
    x = torch.ones(1, 2).to(device)
    for _ in range(3):
        out = model(x)
    assert model.calls.item() == 3
    torch.testing.assert_close(out, model.linear(x))
    assert Counter.forward.__doc__ == "Doc."


def branch(x):
    if x.sum() > 0:
        return x
    return -x


def loop(x):
    while x.sum() < 10:
        x = x * 2
    return x


def iterations(x):
    for _ in range(int(x[0])):
        x = x + 1
    return x


def show(x):
    print(x)
    return x


@pytest.mark.parametrize(
    ("function", "line", "what", "fix"),
    [
        (branch, "if x.sum() > 0:", "control flow depends", "torch.where"),
        (loop, "while x.sum() < 10:", "control flow depends", "torch.while_loop"),
        (iterations, "for _ in range(int(x[0])):", "number of iterations", "static"),
        (show, "print(x)", "print|builtin", "backend='lazytpu'"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_what_cannot_be_one_program_is_named_with_its_line(function, line, what, fix, device):
    with pytest.raises(GraphBreakError, match=what) as caught:
        lazytpu.jit(function)(torch.ones(3).to(device))
    text = str(caught.value)
    assert line in text
    assert "test_jit.py:" in text
    assert fix in text


def test_a_size_that_depends_on_values_is_refused(device):
    with pytest.raises(UnsupportedOpError, match="depends on the values") as caught:
        lazytpu.jit(lambda x: x[x > 0])(torch.ones(3).to(device))
    assert "torch.where" in str(caught.value)


def test_a_wrong_name_is_refused():
    with pytest.raises(ValueError, match="has no argument lr"):
        lazytpu.jit(lambda x: x, static="lr")
    with pytest.raises(ValueError, match="no argument a, b"):
        lazytpu.jit(static=["a", "b"])(lambda x: x)


def test_a_jitted_function_within_another(device):
    @lazytpu.jit(static="power")
    def inner(x, *, power):
        return x**power

    outer = lazytpu.jit(lambda x: inner(x, power=2.0) + 1)
    assert outer(torch.full((2,), 3.0).to(device)).tolist() == [10.0, 10.0]
    assert torch.compile(lambda x: inner(x, power=2.0), fullgraph=True, backend="lazytpu")(torch.ones(2)).tolist() == [
        1,
        1,
    ]


@pytest.mark.parametrize("function", [lambda x: x[: int(x.sum())], torch.nonzero, lambda x: x[x > 0]])
def test_a_size_that_depends_on_values_is_refused_with_its_remedy(device, function):
    def sized(x):
        return function(x)

    with pytest.raises(LazyTPUError, match="size") as raised:
        lazytpu.jit(sized)(torch.ones(3).to(device))
    assert "test_jit.py" in str(raised.value)


def _written(x):
    x = x.clone()
    x[[True, False]] = 3
    x[:, [False, True, True]] *= 2
    x[[[True, True, False], [False, True, True]],] += 9
    return x


WRITTEN_MASKS = {
    "rows": lambda x: x[[True, False]].sum(0),
    "columns": lambda x: x[:, [True, False, True]] * x[:, [True, False, True]].shape[1],
    "none": lambda x: x[[False, False]],
    "elements": lambda x: x[[[True, False, True], [False, True, True]],],
    "a tensor": lambda x: x[0, torch.tensor([True, False, True])].view(2),
    "writes": _written,
}


@pytest.mark.parametrize("function", WRITTEN_MASKS.values(), ids=WRITTEN_MASKS)
def test_masks_that_are_written_out(function, device):
    x = torch.arange(6.0).view(2, 3)
    assert torch.equal(lazytpu.jit(function)(x.to(device)).cpu(), function(x))


def test_a_mask_whose_size_a_later_op_tells_is_refused(device):
    with pytest.raises(UnsupportedOpError, match="depends on the values"):
        lazytpu.jit(lambda x: x[x > 0].view(3))(torch.ones(3).to(device))


def test_two_masks_in_one_index_are_refused(device):
    rows, columns = torch.tensor([True, False]).to(device), torch.tensor([True, False, True]).to(device)
    with pytest.raises(LazyTPUError, match="depends on the value of a tensor"):
        lazytpu.jit(lambda x, m, n: x[m, n])(torch.ones(2, 3).to(device), rows, columns)


VIEWS = {
    "split": lambda a: (*a.split(1), a * 2),
    "unbind": lambda a: a.t().unbind(1)[1],
    "slice": lambda a: a[1:].view(-1),
    "dtypes": lambda a: [y := a.detach() + 1, y.view(torch.int16), y[1:]],
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("size", [(2, 6), (2, 0)])
def test_what_shares_memory_is_seen_to_change(size, requires_grad, device):
    for name, function in VIEWS.items():
        seen = []
        for where, call in (("cpu", function), (device, lazytpu.jit(function))):
            memory = torch.zeros(3, *size).to(where)
            a = memory[1].requires_grad_(requires_grad)
            out = call(a)
            with torch.no_grad():
                memory += 1
            storages = [x.untyped_storage()._cdata for x in (a, *out)] if isinstance(out, (list, tuple)) else []
            seen.append((torch.utils._pytree.tree_map(lambda x: x.tolist(), out), [*map(storages.index, storages)]))
        assert seen[0] == seen[1], name
